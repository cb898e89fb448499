import { keep, kept } from "./storage";

const NAME = "foretoken-theme";

export type Theme = "dark" | "light";

/** What was chosen here, else what the system says. */
export function currentTheme(): Theme {
  const chosen = kept("localStorage", NAME);
  if (chosen === "dark" || chosen === "light") return chosen;
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

export function applyTheme(): void {
  document.documentElement.dataset.theme = currentTheme();
}

export function toggleTheme(): Theme {
  keep("localStorage", NAME, currentTheme() === "dark" ? "light" : "dark");
  applyTheme();
  return currentTheme();
}
