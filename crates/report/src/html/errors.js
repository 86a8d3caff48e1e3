// First of all scripts: what goes wrong in the others is kept where a reader of the page's source finds it.
window.addEventListener("error", (event) => {
  document.documentElement.dataset.error = `${event.message} (line ${event.lineno})`;
});
