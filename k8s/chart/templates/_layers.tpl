{{/* Which layers of files/ make this release, from the lowest up, as JSON. */}}
{{- define "warpsmith.layers" -}}
{{- $on := .Values.components -}}
{{- $layers := list "base" -}}
{{- if eq .Values.target "cpu" -}}
  {{- $layers = append $layers "targets/cpu" -}}
{{- else -}}
  {{- $layers = append $layers "targets/gpu" -}}
{{- end -}}
{{- if eq .Values.target "gpu-with-vllm" -}}{{- $layers = append $layers "targets/gpu-with-vllm" -}}{{- end -}}
{{- if gt (int .Values.gpus) 1 -}}{{- $layers = append $layers "components/many-gpus" -}}{{- end -}}
{{- range list "autoscaling" "autoscaling-by-queue" "postgres" "several-orchestrators" "kueue" "model-synthesis" "model-assists" -}}
  {{- if get $on . -}}{{- $layers = append $layers (print "components/" .) -}}{{- end -}}
{{- end -}}
{{- if .Values.loadModel.enabled -}}{{- $layers = append $layers "components/load-model" -}}{{- end -}}
{{- range list "node-local-dns" "prometheus-operator" "nvidia-runtime" "mutual-tls" "oidc" -}}
  {{- if get $on . -}}{{- $layers = append $layers (print "components/" .) -}}{{- end -}}
{{- end -}}
{{- if eq (include "warpsmith.asksForToken" .) "yes" -}}{{- $layers = append $layers "components/token" -}}{{- end -}}
{{- if get $on "live-page" -}}
  {{- $layers = append $layers "components/live-page" -}}
  {{- if get $on "mutual-tls" -}}{{- $layers = append $layers "components/live-page/mutual-tls" -}}{{- end -}}
  {{- if eq (include "warpsmith.asksForToken" .) "yes" -}}{{- $layers = append $layers "components/live-page/token" -}}{{- end -}}
{{- end -}}
{{- if .Values.ingress.enabled -}}
  {{- $layers = append $layers "components/ingress" -}}
  {{- if get $on "mutual-tls" -}}{{- $layers = append $layers "components/ingress-mutual-tls" -}}{{- end -}}
{{- end -}}
{{- if .Values.gateway.enabled -}}{{- $layers = append $layers "components/gateway" -}}{{- end -}}
{{- toJson $layers -}}
{{- end -}}

{{/* Whoever lets the outside in asks for a token. */}}
{{- define "warpsmith.asksForToken" -}}
{{- if or .Values.token.required .Values.ingress.enabled .Values.gateway.enabled -}}yes{{- end -}}
{{- end -}}

{{/* Changes an object in place. A path's last name is a field; the others are fields, and items by name, mountPath or number. */}}
{{- define "warpsmith.change" -}}
{{- $at := .object -}}
{{- range $step := initial .change.path -}}
  {{- if not (kindIs "slice" $at) -}}
    {{- $at = index $at $step -}}
  {{- else if kindIs "string" $step -}}
    {{- $found := dict -}}
    {{- range $at -}}{{- if eq (.mountPath | default .name) $step -}}{{- $found = . -}}{{- end -}}{{- end -}}
    {{- $at = $found -}}
  {{- else -}}
    {{- $at = index $at (int $step) -}}
  {{- end -}}
{{- end -}}
{{- $last := last .change.path -}}
{{- if hasKey .change "unset" -}}
  {{- $_ := unset $at $last -}}
{{- else if hasKey .change "extend" -}}
  {{- $_ := set $at $last (concat (index $at $last | default list) .change.extend) -}}
{{- else -}}
  {{- $_ := set $at $last .change.set -}}
{{- end -}}
{{- end -}}

{{/* All objects of this release as the kustomizations have them, as YAML of {objects: […]}. */}}
{{- define "warpsmith.objects" -}}
{{- $objects := list -}}
{{- range $name := include "warpsmith.layers" . | fromJsonArray -}}
  {{- $layer := $.Files.Get (printf "files/%s.yaml" $name) | fromYaml -}}
  {{- $objects = concat $objects $layer.objects -}}
  {{- range $change := $layer.changes -}}
    {{- range $object := $objects -}}
      {{- if and (eq $object.kind $change.kind) (eq $object.metadata.name $change.name) -}}
        {{- include "warpsmith.change" (dict "object" $object "change" $change) -}}
      {{- end -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- toYaml (dict "objects" $objects) -}}
{{- end -}}
