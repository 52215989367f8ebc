"use strict";
const input = document.getElementById("search");
const found = document.getElementById("found");
const menu = document.getElementById("menu");

document.getElementById("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
  localStorage.setItem("theme", document.documentElement.dataset.theme = dark ? "light" : "dark");
});

menu.addEventListener("click", () => {
  menu.setAttribute("aria-expanded", String(document.body.classList.toggle("open")));
});

// Every word must be in a section; one in its heading counts for more.
function search(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return [];
  return sections.map((s) => {
    const name = (s.title + " " + s.name).toLowerCase(), text = s.text.toLowerCase();
    let score = 0;
    for (const w of words) {
      if (name.includes(w)) score += 10;
      else if (text.includes(w)) score += 1;
      else return { score: 0 };
    }
    return { score, s, at: text.indexOf(words[0]) };
  }).filter((f) => f.score > 0).sort((a, b) => b.score - a.score).slice(0, 12);
}

function show() {
  const hits = search(input.value);
  found.replaceChildren(...hits.map(({ s, at }) => {
    const a = document.createElement("a");
    a.href = s.page + "#" + s.id;
    a.setAttribute("role", "option");
    const name = document.createElement("b");
    name.textContent = s.title === s.name ? s.name : s.title + " › " + s.name;
    const text = document.createElement("span");
    text.textContent = s.text.slice(Math.max(0, at - 30), at + 90);
    a.append(name, text);
    return a;
  }));
  if (!hits.length && input.value) found.textContent = "Nothing has all these words.";
  found.hidden = !input.value;
  input.setAttribute("aria-expanded", String(!found.hidden));
}
input.addEventListener("input", show);

document.addEventListener("keydown", (e) => {
  const typing = e.target === input, links = [...found.querySelectorAll("a")];
  if (e.key === "/" && !typing) { e.preventDefault(); input.focus(); }
  else if (e.key === "Escape") { input.value = ""; show(); input.blur(); }
  else if (e.key === "Enter" && typing && links.length) location.href = links[0].href;
  else if ((e.key === "ArrowDown" || e.key === "ArrowUp") && !found.hidden && links.length) {
    e.preventDefault();
    const at = links.indexOf(document.activeElement) + (e.key === "ArrowDown" ? 1 : -1);
    (links[at] ?? (at < 0 ? input : links.at(-1))).focus();
  }
});
