/** Small helpers around the DOM. */

/** Makes an element: `h("a", { href: "…", onclick: open }, "text", child)`. Children that are null are left out. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

export const $ = (selector, root = document) => root.querySelector(selector);

/** An icon of index.html. */
export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

/** A button that shows `children`, and is called `label` by screen readers and in its tooltip. */
export function button(label, properties, ...children) {
  return h("button", { type: "button", "aria-label": label, title: label, ...properties }, ...children);
}

export function iconButton(label, name, onclick, properties = {}) {
  return button(label, { class: "icon-button", ...properties, onclick }, icon(name));
}

/** Says `text` to screen readers. */
export function announce(text) {
  $("#announcement").textContent = text;
}

/** Shows a message for a while, with at most one button. The pointer or the keyboard on it keeps it there. */
export function toast(text, action = null) {
  const element = $("#toast");
  const hide = () => {
    if (element.matches(":hover, :focus-within:has(:focus-visible)")) return wait();
    const hadFocus = element.contains(document.activeElement);
    element.replaceChildren();
    if (hadFocus) $("#question").focus();
    return undefined;
  };
  const wait = () => {
    clearTimeout(toast.timer);
    toast.timer = setTimeout(hide, 8000);
  };
  const run = () => {
    element.replaceChildren();
    action.run();
  };
  const actionButton = action && h("button", { type: "button", onclick: run }, action.label);
  element.replaceChildren(h("span", {}, text), actionButton ?? "");
  wait();
}

export function dismissToast() {
  $("#toast").replaceChildren();
}

/** Copies text, and shows for a moment on the button that it did. */
export async function copy(text, target) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyWithSelection(text); // no clipboard API outside https and localhost
  }
  announce("Copied");
  const use = $("use", target);
  use.setAttribute("href", "#icon-check");
  setTimeout(() => use.setAttribute("href", "#icon-copy"), 1500);
}

function copyWithSelection(text) {
  const focused = document.activeElement;
  const area = h("textarea", { class: "visually-hidden" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  focused?.focus();
}

/** Keeps a value in this browser, or with "sessionStorage" in this tab, as far as the browser allows it. */
export function remember(name, value, area = "localStorage") {
  try {
    window[area].setItem(name, value);
  } catch {
    toast("The browser doesn't let this page save that.");
  }
}

/** @returns {?string} what `remember` has kept */
export function recall(name, area = "localStorage") {
  try {
    return window[area].getItem(name);
  } catch {
    return null; // the browser blocks storage
  }
}

/** Opens a dialog. @returns {Promise<boolean>} when it is closed, whether its form was submitted */
export function openDialog(dialog) {
  dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.onclose = () => resolve(dialog.returnValue === "submit");
  });
}

export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
