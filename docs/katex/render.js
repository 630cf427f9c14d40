// Typesets what pymdownx.arithmatex marked, with KaTeX (MIT, see LICENSE); everything comes with the site.
document.addEventListener("DOMContentLoaded", () => {
  for (const formula of document.querySelectorAll(".arithmatex")) {
    renderMathInElement(formula, { delimiters: [{ left: "\\(", right: "\\)", display: false }, { left: "\\[", right: "\\]", display: true }], throwOnError: true });
  }
});
