// Puts what the server tells into the page, part by part, and leaves alone what has not changed: what the reader has
// focused, opened, marked or selected stays as it is. Without it, the page is the same and does not change.
"use strict";

const KEPT = new Set(["open", "checked", "value"]); // what a reader sets by hand

function keyOf(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.id : "";
}

function isAlike(old, now) {
  return old.nodeType === now.nodeType && old.nodeName === now.nodeName && keyOf(old) === keyOf(now);
}

function copyAttributes(old, now) {
  for (const { name } of [...old.attributes]) {
    if (!now.hasAttribute(name) && !KEPT.has(name)) old.removeAttribute(name);
  }
  for (const { name, value } of now.attributes) {
    if (!KEPT.has(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
}

function follows(place, key) {
  while (place && keyOf(place) !== key) place = place.nextSibling;
  return place;
}

// Makes the children of `old` those of `now`, keeping every node that is in both.
function patchChildren(old, now) {
  const wanted = new Set([...now.childNodes].map(keyOf).filter(Boolean));
  for (const child of [...old.childNodes]) {
    if (keyOf(child) && !wanted.has(keyOf(child))) child.remove();
  }
  let place = old.firstChild;
  for (const child of [...now.childNodes]) {
    const same = keyOf(child) && follows(place, keyOf(child));
    while (same && place !== same) {
      const next = place.nextSibling;
      place.remove();
      place = next;
    }
    if (place && isAlike(place, child)) {
      const next = place.nextSibling;
      patch(place, child);
      place = next;
    } else if (keyOf(child) || (place && keyOf(place))) {
      old.insertBefore(child, place); // a row that is new stands before those that stay
    } else if (place) {
      const next = place.nextSibling;
      place.replaceWith(child);
      place = next;
    } else {
      old.append(child);
    }
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

function patch(old, now) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== now.nodeValue) old.nodeValue = now.nodeValue;
    return;
  }
  copyAttributes(old, now);
  patchChildren(old, now);
}

function showPart(name, html) {
  const part = document.getElementById(`part-${name}`);
  if (!part) return;
  const made = document.createElement("template");
  made.innerHTML = html;
  const focused = document.activeElement;
  const held = focused && part.contains(focused);
  patchChildren(part, made.content);
  if (held && !part.contains(document.activeElement)) {
    // What had the focus is gone: the reader goes on where it was, not at the top of the page.
    const heading = (part.closest("section") ?? document.getElementById("main")).querySelector("h2");
    heading.tabIndex = -1;
    heading.focus({ preventScroll: true });
  }
}

function watch(address) {
  const source = new EventSource(address);
  source.addEventListener("part", (event) => {
    const { name, html } = JSON.parse(event.data);
    showPart(name, html);
  });
  source.addEventListener("end", () => source.close());
  source.addEventListener("open", () => showPart("connection", ""));
  source.addEventListener("error", () => {
    const isOver = source.readyState === EventSource.CLOSED;
    showPart("connection", isOver ? "This page gets no news any more: reload it." : "The connection is lost; it is tried again.");
  });
  addEventListener("pagehide", () => source.close());
  addEventListener("pageshow", (event) => event.persisted && location.reload());
}

// The choice of light or dark is kept for the other pages, where the browser keeps anything.
function keepTheme() {
  for (const choice of document.querySelectorAll("input[name=theme]")) {
    if (localStorage.getItem("theme") === choice.id) choice.checked = true;
    choice.addEventListener("change", () => localStorage.setItem("theme", choice.id));
  }
}

if (document.body.dataset.events) watch(document.body.dataset.events);
keepTheme();
