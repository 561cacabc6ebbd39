// Runs before the page is first drawn, so that neither the theme nor the sidebar changes in front of the reader.
const THEMES = ["auto", "light", "dark"];
const PHONE = matchMedia("(max-width: 760px)");

function setTheme(theme) {
  document.documentElement.dataset.theme = THEMES.includes(theme) ? theme : "auto";
}

try {
  setTheme(localStorage.getItem("mlxlm.theme"));
} catch {
  setTheme("auto"); // the browser blocks storage
}
document.documentElement.classList.toggle("sidebar-open", !PHONE.matches);
