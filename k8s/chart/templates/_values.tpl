{{/* Combinations that no schema says in one line. */}}
{{- define "warpsmith.refuse" -}}
{{- $on := .Values.components -}}
{{- $vllm := eq .Values.target "gpu-with-vllm" -}}
{{- if and (eq .Values.target "cpu") (gt (int .Values.gpus) 1) -}}
  {{- fail "gpus: the target cpu has none; set target=gpu" -}}
{{- end -}}
{{- range list "model-synthesis" "model-assists" -}}
  {{- if and (get $on .) (not $vllm) -}}{{- fail (printf "components.%s needs target=gpu-with-vllm" .) -}}{{- end -}}
{{- end -}}
{{- if and .Values.loadModel.enabled (not $vllm) -}}{{- fail "loadModel.enabled needs target=gpu-with-vllm" -}}{{- end -}}
{{- if and (get $on "kueue") (eq .Values.target "cpu") -}}
  {{- fail "components.kueue: the target cpu has no GPU to queue for; set target=gpu" -}}
{{- end -}}
{{- if and (get $on "autoscaling-by-queue") (not $on.autoscaling) -}}
  {{- fail "components.autoscaling-by-queue needs components.autoscaling=true" -}}
{{- end -}}
{{- range $name, $service := .Values.services -}}
  {{- if and $on.autoscaling $service.replicas -}}
    {{- fail (printf "services.%s.replicas: components.autoscaling decides the number" $name) -}}
  {{- end -}}
{{- end -}}
{{- if and .Values.ingress.enabled .Values.gateway.enabled -}}
  {{- fail "ingress.enabled and gateway.enabled: choose one way in" -}}
{{- end -}}
{{- if and .Values.gateway.enabled (get $on "mutual-tls") -}}
  {{- fail "gateway.enabled: no Gateway shows the orchestrator a certificate; take ingress, or leave mutual-tls out" -}}
{{- end -}}
{{- if and .Values.model.url (not $vllm) (not .Values.model.egress) -}}
  {{- fail "model.url: nothing may leave the namespace; model.egress says the way to that server" -}}
{{- end -}}
{{- end -}}

{{/* Values for a service that this release has not. */}}
{{- define "warpsmith.refuseAbsent" -}}
{{- $there := dict -}}
{{- range .objects -}}{{- if .spec -}}{{- if .spec.template -}}{{- $_ := set $there .metadata.name true -}}{{- end -}}{{- end -}}{{- end -}}
{{- $target := .values.target -}}
{{- range $name, $service := .values.services -}}
  {{- if not (hasKey $there $name) -}}
    {{- fail (printf "services.%s: target %s has no such service with these values" $name $target) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{/* Puts this release's values into one object, in place. */}}
{{- define "warpsmith.valued" -}}
{{- $object := .object -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
{{- $labels := $object.metadata.labels | default dict -}}
{{- $own := dict "app.kubernetes.io/managed-by" $root.Release.Service "app.kubernetes.io/instance" $root.Release.Name -}}
{{- $chart := dict "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version) -}}
{{- $_ := set $object.metadata "labels" (merge $own $chart $labels) -}}
{{- if not (has $object.kind (list "PriorityClass" "ResourceFlavor" "ClusterQueue")) -}}{{- $_ := set $object.metadata "namespace" $root.Release.Namespace -}}{{- end -}}
{{- include "warpsmith.edge" . -}}
{{- if eq $object.kind "PersistentVolumeClaim" -}}
  {{- include "warpsmith.claim" (dict "claim" $object "storage" $values.storage) -}}
  {{- /* What was found, and weights, outlive the release; one of the same name takes them again. */ -}}
  {{- $_ := set $object.metadata "annotations" (dict "helm.sh/resource-policy" "keep") -}}
{{- else if has $object.kind (list "Deployment" "StatefulSet" "Job") -}}
  {{- $name := $object.metadata.name -}}
  {{- $service := get $values.services $name | default dict -}}
  {{- range $claim := $object.spec.volumeClaimTemplates -}}
    {{- include "warpsmith.claim" (dict "claim" $claim "storage" $values.storage) -}}
  {{- end -}}
  {{- if $service.replicas -}}{{- $_ := set $object.spec "replicas" $service.replicas -}}{{- end -}}
  {{- if and (eq $name "benchmark") (gt (int $values.gpus) 1) -}}
    {{- $_ := set $object.spec "replicas" (sub (int $values.gpus) 1) -}}
  {{- end -}}
  {{- include "warpsmith.pod" (dict "pod" $object.spec.template.spec "service" $service "name" $name "root" $root) -}}
{{- end -}}
{{- end -}}

{{/* Names of the edge: host, certificate, class or Gateway, and who is let in. */}}
{{- define "warpsmith.edge" -}}
{{- $object := .object -}}
{{- $values := .root.Values -}}
{{- $edge := ternary $values.ingress $values.gateway $values.ingress.enabled -}}
{{- if eq $object.kind "Ingress" -}}
  {{- $annotations := merge dict $edge.annotations $object.metadata.annotations -}}
  {{- $secret := "nginx.ingress.kubernetes.io/proxy-ssl-secret" -}}
  {{- if hasKey $annotations $secret -}}{{- $_ := set $annotations $secret (print .root.Release.Namespace "/client-tls") -}}{{- end -}}
  {{- $_ := set $object.metadata "annotations" $annotations -}}
  {{- $_ := set $object.spec "ingressClassName" $edge.className -}}
  {{- $_ := set (first $object.spec.rules) "host" $edge.host -}}
  {{- $_ := set $object.spec "tls" (list (dict "hosts" (list $edge.host) "secretName" $edge.secret)) -}}
{{- else if eq $object.kind "GRPCRoute" -}}
  {{- $_ := set $object.spec "hostnames" (list $edge.host) -}}
  {{- $_ := set $object.spec "parentRefs" (list $edge.parent) -}}
{{- else if and (eq $object.kind "NetworkPolicy") (eq $object.metadata.name "edge") -}}
  {{- $peer := first (first $object.spec.ingress).from -}}
  {{- $_ := set $peer.namespaceSelector.matchLabels "kubernetes.io/metadata.name" $edge.namespace -}}
{{- else if and (eq $object.kind "Deployment") (eq $object.metadata.name "orchestrator") -}}
  {{- range $volume := $object.spec.template.spec.volumes -}}
    {{- if eq $volume.name "token" -}}{{- $_ := set $volume.secret "secretName" $values.token.secret -}}{{- end -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{- define "warpsmith.claim" -}}
{{- $kinds := dict "warpsmith-runs" "runs" "warpsmith-model" "model" -}}
{{- $size := get .storage (get $kinds .claim.metadata.name | default "database") -}}
{{- if .storage.class -}}{{- $_ := set .claim.spec "storageClassName" .storage.class -}}{{- end -}}
{{- if $size -}}{{- $_ := set .claim.spec.resources.requests "storage" $size -}}{{- end -}}
{{- end -}}

{{- define "warpsmith.pod" -}}
{{- $pod := .pod -}}
{{- $service := .service -}}
{{- $values := .root.Values -}}
{{- if $values.imagePullSecrets -}}{{- $_ := set $pod "imagePullSecrets" $values.imagePullSecrets -}}{{- end -}}
{{- $selector := mergeOverwrite dict ($pod.nodeSelector | default dict) $values.nodeSelector ($service.nodeSelector | default dict) -}}
{{- if $selector -}}{{- $_ := set $pod "nodeSelector" $selector -}}{{- end -}}
{{- $tolerations := concat ($pod.tolerations | default list) $values.tolerations ($service.tolerations | default list) -}}
{{- if $tolerations -}}{{- $_ := set $pod "tolerations" $tolerations -}}{{- end -}}
{{- range $container := concat $pod.containers ($pod.initContainers | default list) -}}
  {{- $_ := set $container "image" (include "warpsmith.image" (dict "image" $container.image "root" $.root)) -}}
{{- end -}}
{{- $container := first $pod.containers -}}
{{- if $service.image -}}{{- $_ := set $container "image" $service.image -}}{{- end -}}
{{- if $service.resources -}}
  {{- $resources := mergeOverwrite dict $container.resources $service.resources -}}
  {{- /* A pod that measures is Guaranteed. */ -}}
  {{- if has .name (list "benchmark" "checking") -}}{{- $_ := set $resources "requests" $resources.limits -}}{{- end -}}
  {{- $_ := set $container "resources" $resources -}}
{{- end -}}
{{- $env := mergeOverwrite (include "warpsmith.modelVariables" . | fromYaml) ($service.env | default dict) -}}
{{- range $variable := $container.env -}}
  {{- /* As many threads as processors. */ -}}
  {{- if eq $variable.name "OMP_NUM_THREADS" -}}
    {{- if (($service.resources).limits).cpu -}}{{- $_ := set $variable "value" (toString $service.resources.limits.cpu) -}}{{- end -}}
  {{- end -}}
  {{- if hasKey $env $variable.name -}}{{- $_ := set $variable "value" (get $env $variable.name | toString) -}}{{- end -}}
{{- end -}}
{{- range $name, $value := $env -}}
  {{- $known := dict -}}
  {{- range $container.env -}}{{- $_ := set $known .name true -}}{{- end -}}
  {{- if not (hasKey $known $name) -}}
    {{- $_ := set $container "env" (append $container.env (dict "name" $name "value" (toString $value))) -}}
  {{- end -}}
{{- end -}}
{{- end -}}

{{/* An image's name with this release's registry, tag and digest. */}}
{{- define "warpsmith.image" -}}
{{- $values := .root.Values -}}
{{- $parts := splitList ":" .image -}}
{{- $name := first $parts -}}
{{- $tag := .root.Chart.AppVersion -}}
{{- if gt (len $parts) 1 -}}
  {{- $tag = last $parts -}}
{{- else if and (eq $name "warpsmith-bench") (ne $values.target "cpu") -}}
  {{- $tag = print $tag "-cuda" -}}
{{- end -}}
{{- $keys := dict "vllm/vllm-openai" "vllm" -}}
{{- $own := get $values.images (get $keys $name | default (trimPrefix "warpsmith-" $name)) | default dict -}}
{{- $full := $name -}}
{{- if and $values.registry (hasPrefix "warpsmith-" $name) -}}{{- $full = printf "%s/%s" $values.registry $name -}}{{- end -}}
{{- $full = $own.name | default $full -}}
{{- if $own.digest -}}{{- printf "%s@%s" $full $own.digest -}}{{- else -}}{{- printf "%s:%s" $full ($own.tag | default $tag) -}}{{- end -}}
{{- end -}}

{{/* What a service is told about the language model, as YAML. */}}
{{- define "warpsmith.modelVariables" -}}
{{- $model := .root.Values.model -}}
{{- $variables := dict -}}
{{- $asks := eq .name "reasoning" -}}
{{- range (first .pod.containers).env -}}{{- if eq .name "WARPSMITH_MODEL_URL" -}}{{- $asks = true -}}{{- end -}}{{- end -}}
{{- if and $asks $model.url -}}
  {{- $_ := set $variables "WARPSMITH_MODEL_URL" $model.url -}}
  {{- if eq .name "reasoning" -}}{{- $_ := set $variables "WARPSMITH_REASONER" "vllm" -}}{{- end -}}
{{- end -}}
{{- if and $asks $model.name -}}{{- $_ := set $variables "WARPSMITH_MODEL" $model.name -}}{{- end -}}
{{- $load := .root.Values.loadModel -}}
{{- if eq .name "load-model" -}}{{- $variables = dict "MODEL" $load.name "REVISION" $load.revision -}}{{- end -}}
{{- toYaml $variables -}}
{{- end -}}

{{/* The way to a model's server of one's own. */}}
{{- define "warpsmith.modelPolicy" -}}
{{- if .Values.model.egress }}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: to-model
  namespace: {{ .Release.Namespace }}
spec:
  podSelector:
    matchLabels:
      app.kubernetes.io/component: reasoning
  policyTypes:
    - Egress
  egress:
    {{- toYaml .Values.model.egress | nindent 4 }}
{{- end }}
{{- end -}}
