// Makes and changes elements. Values become text or attributes, never HTML.

/** An element with properties (`class`, `text`, `on`, `data`, or attributes) and children. */
export function h(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

/** As `h`, of SVG. */
export function svg(tag, properties = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.setAttribute("class", value);
    else if (name === "text") element.textContent = value;
    else if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "data") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Sets an element's text if it differs, so that an unchanged page costs no layout. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Sets a CSS custom property if it differs. */
export function tune(element, name, value) {
  if (element.style.getPropertyValue(name) !== String(value)) element.style.setProperty(name, value);
}

/** Shows or hides an element. */
export function show(element, visible) {
  if (element.hidden === visible) element.hidden = !visible;
}

/** Keeps `parent`'s children in step with `values`: one child for each key, made once, updated each time, in order. */
export function reconcile(known, parent, values, keyOf, make, before = null) {
  const wanted = new Set(values.map(keyOf));
  let changed = false;
  for (const [key, view] of known) {
    if (wanted.has(key)) continue;
    view.element.remove();
    known.delete(key);
    changed = true;
  }
  let next = before;
  for (const value of [...values].reverse()) {
    const key = keyOf(value);
    let view = known.get(key);
    if (!view) {
      view = make(value);
      known.set(key, view);
      changed = true;
    }
    if (view.element.parentNode !== parent || view.element.nextSibling !== next) {
      parent.insertBefore(view.element, next);
      changed = true;
    }
    view.update(value);
    next = view.element;
  }
  return changed;
}

/** A button that copies what `text()` returns. */
export function copyButton(text, name) {
  const button = h("button", { type: "button", class: "quiet", "aria-label": `Copy ${name}`, text: "Copy" });
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      button.textContent = "Copied";
    } catch {
      button.textContent = "Not allowed";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

let lastAnnounced = "";

/** Has a screen reader say something, once. */
export function announce(text) {
  if (text === lastAnnounced) return;
  lastAnnounced = text;
  byId("announcements").textContent = text;
}
