"use strict";
// Values under the pointer; without this script the browser shows the same words as titles.
const tip = document.createElement("div");
tip.className = "tip";
tip.hidden = true;
document.body.append(tip);
for (const spot of document.querySelectorAll(".hit")) {
  const title = spot.querySelector("title"), words = title.textContent;
  title.remove();
  spot.addEventListener("pointermove", (event) => {
    tip.textContent = words;
    tip.hidden = false;
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.min(event.clientY + 18, innerHeight - tip.offsetHeight - 8)}px`;
  });
  spot.addEventListener("pointerleave", () => { tip.hidden = true; });
}
