/**
 * The colours: light, dark, or the system's. No module, so that it runs before anything is painted; the choice is kept
 * in this browser.
 */
(() => {
  const NAME = "headlong-theme";
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  let chosen = kept();

  function kept() {
    try {
      const name = localStorage.getItem(NAME);
      return name === "light" || name === "dark" ? name : "system";
    } catch {
      return "system";
    }
  }

  function apply() {
    root.dataset.theme = chosen === "system" ? (dark.matches ? "dark" : "light") : chosen;
  }

  function choose(name) {
    chosen = name;
    apply();
    try {
      if (name === "system") localStorage.removeItem(NAME);
      else localStorage.setItem(NAME, name);
    } catch {
      // A browser that keeps nothing shows the choice until the page is left.
    }
  }

  apply();
  dark.addEventListener("change", apply);
  addEventListener("DOMContentLoaded", () => {
    const select = document.getElementById("theme");
    select.value = chosen;
    select.addEventListener("change", () => choose(select.value));
  });
})();
