// The program as it runs: kernels, in them loops, stages and waits, one below the other; arcs lead from makers to readers.

const ARCS = 64;
const closed = new Set();

function programRows(search) {
  const rows = [];
  launches.forEach((launch, number) => {
    const found = search ? launch.stages.filter((stage) => haystack(stage).includes(search)) : launch.stages;
    const named = search && kernels[launch.kernel].name.toLowerCase().includes(search);
    if (search && !found.length && !named) return;
    rows.push({ kind: "kernel", number });
    if (closed.has(number) && !search) return;
    const hits = new Set(found);
    const own = waitsOfLaunch[number];
    let loop = null;
    for (const stage of launch.stages) {
      const before = search ? [] : own.filter((wait) => waits[wait].at === stage);
      const of = (place) =>
        before
          .filter((wait) => waits[wait].place === place)
          .forEach((wait) => rows.push({ kind: "wait", number: wait, deep: loop !== null }));
      if (stages[stage].loop !== loop) {
        loop = null;
        of("loop");
        loop = stages[stage].loop;
        if (loop !== null && (!search || loops[loop].stages.some((one) => hits.has(one))))
          rows.push({ kind: "loop", number: loop });
      }
      of("steps");
      of("before");
      if (hits.has(stage)) rows.push({ kind: "stage", number: stage });
    }
  });
  return rows;
}

function programView() {
  const arcs = svg("svg", { class: "arcs", width: ARCS, "aria-hidden": "true" });
  const list = new LongList({
    label: "Kernels, loops, stages and waits in the order in which they run",
    role: "tree",
    kind: "program",
    height: (row) => ({ kernel: 38, loop: 26, wait: 22, stage: 27 })[row.kind],
    draw: drawProgramRow,
    select: (row, open) =>
      choose(row.kind === "kernel" ? "launch" : row.kind, row.number, { from: "list", focus: open }),
    toggle: (row, open) => {
      const number =
        row.kind === "kernel"
          ? row.number
          : row.kind === "stage"
            ? stages[row.number].launch
            : row.kind === "loop"
              ? loops[row.number].launch
              : waits[row.number].launch;
      if (open === undefined ? closed.has(number) : open) closed.delete(number);
      else closed.add(number);
      refresh((one) => one.kind === "kernel" && one.number === number);
    },
    drawn: (first, last) => drawArcs(list, arcs, first, last),
  });
  const about = el("span", { class: "grow" });
  const refresh = (keep = null) => {
    list.show(programRows(searched), keep);
    const count = list.rows.filter((row) => row.kind === "stage").length;
    about.textContent = searched
      ? `${counted(count, "stage")} found`
      : "Arcs lead from the stage that makes a tensor to those that read it.";
    empty(list, searched);
  };
  const all = (close) => () => {
    closed.clear();
    if (close) launches.forEach((_, number) => closed.add(number));
    refresh();
  };
  const head = el(
    "div",
    { class: "listhead" },
    el("h2", {}, "Program"),
    about,
    el("button", { class: "plain", type: "button", onclick: all(true) }, "Close all"),
    el("button", { class: "plain", type: "button", onclick: all(false) }, "Open all"),
  );
  const columns = el(
    "div",
    { class: "columns", "aria-hidden": "true" },
    el("span", { style: { width: `${ARCS}px` } }),
    el("span", { class: "grow" }, "stage"),
    el("span", { class: "right w120 wide" }, "tiles × threads"),
    el("span", { class: "right w80" }, "moves"),
    el("span", { class: "right w80" }, "µs"),
    el("span", { style: { width: "84px" } }, "predicted"),
  );
  return {
    nodes: [head, columns, list.node],
    list,
    refresh,
    find: (kind, number) => (row) =>
      row.number === number && (row.kind === kind || (kind === "launch" && row.kind === "kernel")),
    open: (kind, number) => {
      const launch = {
        stage: () => stages[number].launch,
        wait: () => waits[number].launch,
        loop: () => loops[number].launch,
      }[kind]?.();
      if (launch !== undefined && closed.delete(launch)) refresh();
    },
  };
}

// Characters of a stage's name that its column holds; the end tells names apart.
const nameRoom = () => Math.max(18, Math.floor((main.clientWidth - (main.clientWidth > 815 ? 490 : 355)) / 7.3));

function drawProgramRow(row) {
  const gutter = el("span", { style: { width: `${ARCS}px` } });
  if (row.kind === "kernel") {
    const launch = launches[row.number];
    const kernel = kernels[launch.kernel];
    const again = launch.like !== row.number ? ` · as launch ${launch.like + 1}` : "";
    const open = !closed.has(row.number) || Boolean(searched);
    return el(
      "div",
      { class: "kernel", "aria-level": "1", "aria-expanded": String(open), title: kernel.name },
      el("span", { class: "twist", "data-twist": "" }, open ? "▾" : "▸"),
      el(
        "span",
        { class: "grow" },
        `Kernel ${launch.kernel + 1} `,
        el("span", { class: "mono muted" }, tail(kernel.name.replace(/^kernel\d+_/, ""), 44)),
        el(
          "span",
          { class: "muted", style: { "font-weight": "400" } },
          `  ${counted(launch.stages.length, "stage")}${again}`,
        ),
      ),
      el(
        "span",
        { class: "right w120 wide muted", style: { "font-weight": "400" } },
        kernel.grid_syncs ? counted(kernel.grid_syncs, "grid barrier") : "",
      ),
      el("span", { class: "right w80" }, bytes(launch.bytes_read + launch.bytes_written)),
      el("span", { class: "right w80" }, micros(kernel.seconds)),
      el("span", { style: { width: "84px" } }),
    );
  }
  if (row.kind === "loop") {
    const loop = loops[row.number];
    return el(
      "div",
      { class: "loop", "aria-level": "2" },
      gutter,
      `↻ ${counted(loop.steps, "step")} of ${counted(loop.stages.length, "stage")}`,
    );
  }
  if (row.kind === "wait") {
    const wait = waits[row.number];
    const times = wait.runs > 1 ? ` × ${whole(wait.runs)}` : "";
    const where = wait.place === "steps" ? ", between steps" : "";
    return el(
      "div",
      { class: `wait ${wait.scope}`, "aria-level": "2", title: wait.reason },
      gutter,
      el("span", { class: "rule", style: { "margin-left": row.deep ? "18px" : "0" } }),
      el("span", { class: "what" }, `${SCOPES[wait.scope] ?? wait.scope}${times}${where}`),
      el("span", { class: "grow" }, wait.reason),
    );
  }
  const stage = stages[row.number];
  const name = tail(stage.name, nameRoom());
  return el(
    "div",
    { class: "stage", "aria-level": "2", title: stage.name },
    gutter,
    el(
      "span",
      { class: "grow mono", style: { "padding-left": stage.loop === null ? "0" : "18px" } },
      marked(name, searched),
    ),
    el("span", { class: "right w120 wide muted" }, `${whole(stage.tiles)} × ${stage.threads}`),
    el("span", { class: "right w80 muted" }, bytes(stageBytes[row.number])),
    el("span", { class: "right w80" }, micros(stage.seconds)),
    el(
      "span",
      { class: "timebar" },
      longest
        ? el("i", {
            style: { width: `${(100 * (stage.seconds ?? 0)) / longest}%`, background: boundColor(stage.bound) },
          })
        : null,
    ),
  );
}

function drawArcs(list, arcs, first, last) {
  if (list.placed !== list.rows) {
    list.placed = list.rows;
    list.middles = new Map();
    list.rows.forEach((row, index) => {
      if (row.kind === "stage" || row.kind === "kernel")
        list.middles.set(`${row.kind} ${row.number}`, (list.tops[index] + list.tops[index + 1]) / 2);
    });
  }
  const place = (stage) => list.middles.get(`stage ${stage}`) ?? list.middles.get(`kernel ${stages[stage].launch}`);
  const picked =
    selected.kind === "stage" ? selected.number : selected.kind === "wait" ? waits[selected.number].before : -1;
  const paths = [];
  const arc = (maker, reader, kind) => {
    const [from, to] = [place(maker), place(reader)];
    if (from === undefined || to === undefined || from === to) return;
    const reach = Math.min(ARCS - 12, 10 + Math.sqrt(Math.abs(to - from)) * 1.6);
    const x = ARCS + 12;
    paths.push(svg("path", { class: kind, d: `M${x} ${from} C${x - reach} ${from} ${x - reach} ${to} ${x} ${to}` }));
  };
  const drawn = new Set();
  const edge = (maker, reader) => {
    const key = `${maker} ${reader}`;
    if (drawn.has(key) || drawn.size > 1500) return;
    drawn.add(key);
    const back = stages[reader].needs.includes(maker) ? "" : " back";
    arc(maker, reader, (reader === picked ? "in" : maker === picked ? "out" : "") + back);
  };
  for (let index = first; index < last; index++) {
    const row = list.rows[index];
    if (row.kind !== "stage") continue;
    for (const maker of new Set([...stages[row.number].needs, ...stages[row.number].needs_before]))
      edge(maker, row.number);
    for (const reader of readers[row.number].slice(0, 40)) edge(row.number, reader);
  }
  arcs.replaceChildren(...paths);
  arcs.setAttribute("height", list.tops.at(-1));
  list.space.append(arcs);
}
