const tip = document.getElementById("tip");

let shown = null;

function show(point) {
  shown = point;
  tip.textContent = point.dataset.tip;
  tip.hidden = false;
  const at = point.getBoundingClientRect();
  const left = Math.min(at.right + 8, innerWidth - tip.offsetWidth - 8);
  const above = at.top - tip.offsetHeight - 8;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${above > 8 ? above : at.bottom + 8}px`;
}

function hide() {
  shown = null;
  tip.hidden = true;
}

for (const point of document.querySelectorAll("[data-tip]")) {
  point.addEventListener("pointerenter", () => show(point));
  point.addEventListener("focus", () => show(point));
  point.addEventListener("pointerleave", hide);
  point.addEventListener("blur", hide);
}
// What has the focus may have been scrolled into view by it.
addEventListener("scroll", () => shown && show(shown), { passive: true });
addEventListener("keydown", (event) => event.key === "Escape" && hide());
