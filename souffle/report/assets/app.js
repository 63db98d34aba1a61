// Parts of the page, what is selected, the search, keys, and light and dark.

const TABS = [
  ["overview", "Overview", null, () => ({ nodes: [overview()] })],
  ["program", "Program", stages.length, programView],
  ["tensors", "Tensors", tensors.length, tensorsView],
  ["waits", "Waits", waits.length, waitsView],
  ["decisions", "Decisions", decisions.length, decisionsView],
  ["certificate", "Certificate", null, certificateView],
  ["cuda", "CUDA", null, cudaView],
];
const FILLED = new Set(["program", "tensors", "waits", "decisions", "cuda"]);
const HOME = {
  stage: "program",
  launch: "program",
  loop: "program",
  wait: "waits",
  tensor: "tensors",
  decision: "decisions",
};

const main = document.getElementById("main");
const searchBox = document.getElementById("search");
const tabBar = document.getElementById("tabs");
const themed = [];
const views = new Map();
let current = "overview";
let selected = { kind: null, number: -1 };
let searched = "";
let list = null;

function showTab(name, keep = null) {
  current = name;
  for (const button of tabBar.children) {
    const chosen = button.dataset.tab === name;
    button.setAttribute("aria-selected", String(chosen));
    button.tabIndex = chosen ? 0 : -1;
  }
  if (!views.has(name)) views.set(name, TABS.find((tab) => tab[0] === name)[3]());
  const view = views.get(name);
  main.className = FILLED.has(name) ? "filled" : "";
  main.setAttribute("aria-labelledby", `tab-${name}`);
  main.replaceChildren(...view.nodes);
  list = view.list ?? null;
  searchBox.disabled = !view.refresh;
  searchBox.placeholder = view.refresh ? `Search ${name === "cuda" ? "CUDA" : name}` : "Search";
  keep ??= selected.kind && view.find ? view.find(selected.kind, selected.number) : null;
  view.refresh?.(keep);
  if (list && list.current >= 0) {
    list.reveal(list.current);
    list.paint();
  }
  remember();
}

// Select something, and show it where it stands, unless it is seen already.
function choose(kind, number, { from = null, focus = false } = {}) {
  selected = { kind, number };
  drawDetail();
  const view = views.get(current);
  if (from === "list") {
    list?.paint();
    if (focus) panel.focus();
  } else if (view?.find && list) {
    let row = list.rows.findIndex(view.find(kind, number));
    if (row < 0 && current === "program") {
      if (searched && ["stage", "launch", "loop", "wait"].includes(kind)) search("");
      view.open?.(kind, number);
      row = list.rows.findIndex(view.find(kind, number));
    }
    if (row >= 0) list.move(row, false);
    else {
      list.current = -1;
      list.paint();
    }
  }
  themed.forEach((draw) => draw());
  remember();
}

function search(text) {
  searched = text.trim().toLowerCase();
  if (searchBox.value.trim().toLowerCase() !== searched) searchBox.value = text;
  const view = views.get(current);
  view?.refresh?.(selected.kind && view.find ? view.find(selected.kind, selected.number) : null);
  if (list) {
    list.node.scrollTop = 0;
    list.paint();
  }
}

// The address says what is seen, so that it can be handed on, and so that going back goes back.
let remembering = true;
function remember() {
  const address = `#${current}${selected.kind ? `/${selected.kind}/${selected.number}` : ""}`;
  if (remembering && location.hash !== address) history.pushState(null, "", address);
}
function recall() {
  const [tab, kind, number] = location.hash.slice(1).split("/");
  const all = { stage: stages, launch: launches, loop: loops, wait: waits, tensor: tensors, decision: decisions }[kind];
  remembering = false;
  if (all && all[Number(number)]) selected = { kind, number: Number(number) };
  else selected = { kind: null, number: -1 };
  showTab(TABS.some((one) => one[0] === tab) ? tab : "overview");
  drawDetail();
  remembering = true;
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  const button = document.getElementById("theme");
  button.textContent = name === "dark" ? "Light" : "Dark";
  themed.forEach((draw) => draw());
}

function start() {
  document.getElementById("model-name").textContent = `${report.name} · ${report.shown}`;
  document.getElementById("model-name").title = report.name;
  TABS.forEach(([name, words, count], number) =>
    tabBar.append(
      el(
        "button",
        {
          type: "button",
          role: "tab",
          id: `tab-${name}`,
          "data-tab": name,
          "aria-controls": "main",
          title: `${words} (${number + 1})`,
          onclick: () => {
            search("");
            showTab(name);
          },
        },
        words,
        count === null ? null : el("span", { class: "count" }, whole(count)),
      ),
    ),
  );
  tabBar.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const at = (TABS.findIndex((tab) => tab[0] === current) + step + TABS.length) % TABS.length;
    search("");
    showTab(TABS[at][0]);
    tabBar.children[at].focus();
    event.preventDefault();
  });
  searchBox.addEventListener("input", () => search(searchBox.value));
  searchBox.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "Enter") {
      if (list?.rows.length) {
        const first = list.rows.findIndex((row) => row.kind === undefined || row.kind === "stage");
        list.node.focus();
        list.move(Math.max(0, first));
      }
      event.preventDefault();
    } else if (event.key === "Escape") {
      search("");
      (list?.node ?? main).focus();
    }
  });
  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches("input, select, textarea");
    if (event.ctrlKey || event.altKey || event.metaKey || typing) return;
    if (event.key === "/") {
      if (searchBox.disabled) showTab("program");
      searchBox.focus();
      searchBox.select();
    } else if (event.key >= "1" && event.key <= String(TABS.length)) {
      search("");
      showTab(TABS[Number(event.key) - 1][0]);
      (list?.node ?? main).focus();
    } else if (event.key === "Escape") (list?.node ?? main).focus();
    else return;
    event.preventDefault();
  });
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(dark.matches ? "dark" : "light");
  let own = false;
  dark.addEventListener("change", () => {
    if (!own) setTheme(dark.matches ? "dark" : "light");
  });
  document.getElementById("theme").addEventListener("click", () => {
    own = true;
    setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  });
  window.addEventListener("popstate", recall);
  recall();
  document.body.dataset.ready = "yes";
}

start();
