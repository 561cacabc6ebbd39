/** What is around the conversation: the sidebar, the theme, dialogs and shortcuts. Some of it is begun in early.js. */
import { $, openDialog, remember, toast } from "./dom.js";

const root = document.documentElement;

/**
 * Connects buttons and shortcuts.
 * @param {Object<string, () => void>} actions  by the id of their button
 */
export function enableControls(actions) {
  const all = {
    ...actions,
    "toggle-sidebar": () => toggleSidebar(),
    "close-sidebar": () => toggleSidebar(false),
    "theme": cycleTheme,
    "help-button": () => openDialog($("#help")),
  };
  for (const [id, action] of Object.entries(all)) $(`#${id}`).addEventListener("click", () => action());
  for (const close of document.querySelectorAll("dialog .close")) {
    close.addEventListener("click", () => close.closest("dialog").close());
  }
  document.addEventListener("keydown", (event) => {
    const action = document.querySelector("dialog[open]") ? null : shortcut(event, all);
    if (!action) return;
    event.preventDefault();
    action();
  });
  document.addEventListener("pointerdown", ({ target }) => {
    if (isCovering() && !target.closest("#sidebar")) toggleSidebar(false);
  });
  toggleSidebar(!PHONE.matches);
  PHONE.addEventListener("change", () => toggleSidebar(!PHONE.matches));
}

function shortcut(event, actions) {
  const command = event.ctrlKey || event.metaKey;
  const key = event.key.toLowerCase();
  if (event.key === "Escape") return isCovering() ? actions["close-sidebar"] : $("#stop").hidden ? null : actions.stop;
  if (command && event.shiftKey && key === "o") return actions.new;
  if (command && key === "k") return searchConversations;
  if (command && key === ".") return actions["settings-button"];
  if (command && key === "/") return actions["help-button"];
  if (key === "?" && !event.target.matches("input, textarea, select")) return actions["help-button"];
  return null;
}

function searchConversations() {
  toggleSidebar(true);
  $("#search").select();
}

/** On a narrow screen the sidebar covers the conversation. */
const isCovering = () => PHONE.matches && root.classList.contains("sidebar-open");

function toggleSidebar(shown = !root.classList.contains("sidebar-open")) {
  const hadFocus = $("#sidebar").contains(document.activeElement);
  root.classList.toggle("sidebar-open", shown);
  $("#toggle-sidebar").setAttribute("aria-expanded", shown);
  $("main").inert = isCovering();
  if (isCovering()) $("#new").focus();
  else if (hadFocus) $("#toggle-sidebar").focus();
}

export function closeSidebarOnPhone() {
  if (PHONE.matches) toggleSidebar(false);
}

function cycleTheme() {
  const theme = THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % THEMES.length];
  setTheme(theme);
  toast(`Theme: ${theme === "auto" ? "that of the system" : theme}`);
  remember("mlxlm.theme", theme);
}
