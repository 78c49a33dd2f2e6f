// Light or dark: as the system has it, until somebody chooses.

const dark = matchMedia("(prefers-color-scheme: dark)");

/** Let a button switch between light and dark. */
export function switchTheme(button) {
  const root = document.documentElement;
  const isDark = () => (root.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
  const show = () => button.setAttribute("aria-pressed", String(isDark()));
  const chosen = localStorage.getItem("theme");
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    localStorage.setItem("theme", root.dataset.theme);
    show();
  });
  dark.addEventListener("change", show);
  show();
}
