// Tensors, waits, decisions and the certificate.

function empty(list, search) {
  list.node.querySelector(".nothing")?.remove();
  if (!list.rows.length)
    list.node.append(el("p", { class: "nothing" }, search ? "Nothing has these letters." : "There are none."));
}

// A text with what was searched for marked.
function marked(text, search) {
  if (!search) return text;
  const at = text.toLowerCase().indexOf(search);
  if (at < 0) return text;
  return [
    text.slice(0, at),
    el("mark", { class: "hit" }, text.slice(at, at + search.length)),
    text.slice(at + search.length),
  ];
}

const tensorKind = (tensor) =>
  tensor.near && !tensor.read && !tensor.written ? "on chip" : tensor.kind === "chip" ? "workspace" : tensor.kind;

function tensorsView() {
  const orders = {
    "bytes moved": (t) => -(t.read + t.written),
    size: (t) => -t.bytes,
    readers: (t) => -t.readers.length,
    "on chip": (t) => -t.near,
    name: (t) => t.name,
  };
  let order = "bytes moved";
  const most = tensors.reduce((found, one) => Math.max(found, one.read + one.written), 0);
  const list = new LongList({
    label: "Tensors",
    height: () => 30,
    draw: ({ number }) => {
      const tensor = tensors[number];
      return el(
        "div",
        { title: tensor.name },
        el(
          "span",
          { class: "grow mono" },
          marked(tail(tensor.name, 60), searched),
          tensor.label !== tensor.name ? el("span", { class: "muted" }, `  ${tensor.label}`) : null,
        ),
        el("span", { class: "w80 muted" }, tensorKind(tensor)),
        el("span", { class: "right w96" }, bytes(tensor.bytes)),
        el("span", { class: "right w96 wide" }, tensor.read ? bytes(tensor.read) : "–"),
        el("span", { class: "right w96 wide" }, tensor.written ? bytes(tensor.written) : "–"),
        el("span", { class: "right w60" }, whole(tensor.readers.length)),
        el("span", { class: "right w60" }, tensor.near ? whole(tensor.near) : "–"),
        el("span", { class: "w96" }, meter([[tensor.read + tensor.written, "var(--memory)"]], most)),
      );
    },
    select: (row, open) => choose("tensor", row.number, { from: "list", focus: open }),
  });
  const buttons = el(
    "select",
    {
      "aria-label": "Order",
      onchange: (event) => {
        order = event.target.value;
        refresh();
      },
    },
    Object.keys(orders).map((name) => el("option", { value: name }, name)),
  );
  const refresh = (keep = null) => {
    const rows = tensors
      .map((tensor, number) => ({ tensor, number }))
      .filter(
        ({ tensor }) =>
          !searched || `${tensor.name}\n${tensor.label}\n${tensorKind(tensor)}`.toLowerCase().includes(searched),
      );
    rows.sort((a, b) => {
      const [x, y] = [orders[order](a.tensor), orders[order](b.tensor)];
      return x < y ? -1 : x > y ? 1 : a.number - b.number;
    });
    list.show(rows, keep);
    empty(list, searched);
  };
  return {
    nodes: [
      el(
        "div",
        { class: "listhead" },
        el("h2", {}, "Tensors"),
        el(
          "span",
          { class: "grow" },
          "Bytes of global memory in one run: distinct elements, counted for each stage that touches them.",
        ),
        el("label", {}, "Most first by ", buttons),
      ),
      el(
        "div",
        { class: "columns", "aria-hidden": "true" },
        el("span", { class: "grow" }, "tensor"),
        el("span", { class: "w80" }, "kind"),
        el("span", { class: "right w96" }, "size"),
        el("span", { class: "right w96 wide" }, "read"),
        el("span", { class: "right w96 wide" }, "written"),
        el("span", { class: "right w60" }, "readers"),
        el("span", { class: "right w60" }, "on chip"),
        el("span", { class: "w96" }, "moved"),
      ),
      list.node,
    ],
    list,
    refresh,
    find: (kind, number) => (row) => kind === "tensor" && row.number === number,
  };
}

function waitsView() {
  const list = new LongList({
    label: "Waits",
    height: () => 46,
    draw: ({ number }) => {
      const wait = waits[number];
      const most = Math.max(12, Math.floor((list.node.clientWidth - 420) / 15));
      const words = el(
        "div",
        { class: "grow" },
        el(
          "div",
          { class: "mono" },
          marked(`${tail(stages[wait.after].name, most)} → ${tail(stages[wait.before].name, most)}`, searched),
        ),
        el("div", { class: "muted" }, wait.reason),
      );
      words.style.whiteSpace = "nowrap";
      return el(
        "div",
        { class: `wait ${wait.scope}`, title: wait.reason },
        el("span", { class: "w60 muted" }, `K${launches[wait.launch].kernel + 1}`),
        el("span", { class: "w120 what" }, SCOPES[wait.scope] ?? wait.scope),
        words,
        el("span", { class: "right w80" }, whole(wait.runs)),
        el("span", { class: "right w80" }, wait.scope === "block" ? "–" : micros(wait.seconds)),
      );
    },
    select: (row, open) => choose("wait", row.number, { from: "list", focus: open }),
  });
  const rank = { grid: 0, flags: 1, block: 2 };
  const refresh = (keep = null) => {
    const rows = waits
      .map((wait, number) => ({ wait, number }))
      .filter(
        ({ wait }) =>
          !searched ||
          [SCOPES[wait.scope], wait.reason, wait.tensor_name, stages[wait.before].name, stages[wait.after].name]
            .join("\n")
            .toLowerCase()
            .includes(searched),
      );
    rows.sort((a, b) => rank[a.wait.scope] - rank[b.wait.scope] || b.wait.runs - a.wait.runs || a.number - b.number);
    list.show(rows, keep);
    empty(list, searched);
  };
  return {
    nodes: [
      el(
        "div",
        { class: "listhead" },
        el("h2", {}, "Waits"),
        el(
          "span",
          { class: "grow" },
          "Where blocks, or the threads of a block, wait for each other, and the dependence that demands it. A dependence that stays on one block needs a block barrier; any other a barrier of the grid, or flags.",
        ),
      ),
      el(
        "div",
        { class: "columns", "aria-hidden": "true" },
        el("span", { class: "w60" }, "kernel"),
        el("span", { class: "w120" }, "wait"),
        el("span", { class: "grow" }, "after → before, and why"),
        el("span", { class: "right w80" }, "runs"),
        el("span", { class: "right w80" }, "µs"),
      ),
      list.node,
    ],
    list,
    refresh,
    find: (kind, number) => (row) => kind === "wait" && row.number === number,
  };
}

function decisionsView() {
  const parts = [...new Set(decisions.map((one) => one[0]))];
  let part = "";
  let verdict = "";
  const list = new LongList({
    label: "Decisions",
    height: () => 46,
    draw: ({ number }) => {
      const [stage, subject, accepted, reason] = decisions[number];
      const words = el(
        "div",
        { class: "grow" },
        el("div", { class: "mono" }, marked(subject, searched)),
        el("div", { class: "muted" }, marked(reason, searched)),
      );
      return el(
        "div",
        { title: `${subject}: ${reason}` },
        el("span", { class: "w96 muted" }, stage),
        el("span", { class: `w60 ${accepted ? "yes" : "no"}` }, accepted ? "done" : "refused"),
        words,
      );
    },
    select: (row, open) => choose("decision", row.number, { from: "list", focus: open }),
  });
  const refresh = (keep = null) => {
    const rows = [];
    decisions.forEach(([stage, subject, accepted, reason], number) => {
      if (
        (!part || stage === part) &&
        (!verdict || accepted === (verdict === "done")) &&
        (!searched || `${subject}\n${reason}`.toLowerCase().includes(searched))
      )
        rows.push({ number });
    });
    list.show(rows, keep);
    about.textContent = `${counted(rows.length, "decision")}, in the order in which they were made.`;
    empty(list, searched);
  };
  const about = el("span", { class: "grow" });
  const choice = (label, names, set) =>
    el(
      "select",
      {
        "aria-label": label,
        onchange: (event) => {
          set(event.target.value);
          refresh();
        },
      },
      el("option", { value: "" }, label),
      names.map((name) => el("option", { value: name }, name)),
    );
  return {
    nodes: [
      el(
        "div",
        { class: "listhead" },
        el("h2", {}, "Decisions"),
        about,
        choice("all stages of the compiler", parts, (to) => {
          part = to;
        }),
        choice("done and refused", ["done", "refused"], (to) => {
          verdict = to;
        }),
      ),
      list.node,
    ],
    list,
    refresh,
    find: (kind, number) => (row) => kind === "decision" && row.number === number,
  };
}

function certificateView() {
  const found = report.certificate;
  if (!found)
    return {
      nodes: [
        el(
          "section",
          {},
          el("h2", {}, "Certificate"),
          el(
            "p",
            { class: "about" },
            'Nothing was proven of this network: it was compiled with verify="off", or saved before there were certificates.',
          ),
        ),
      ],
    };
  const parts = [...found.kernels, found.launches, ...found.others];
  const listed = (title, entries) =>
    entries.length
      ? el(
          "section",
          {},
          el("h2", {}, title),
          el(
            "ul",
            {},
            entries.map((one) => el("li", { class: "mono" }, one)),
          ),
        )
      : null;
  return {
    nodes: [
      el(
        "div",
        { class: "page" },
        el(
          "h1",
          { class: "headline" },
          found.verdict === "PROVEN"
            ? "Proven free of races and stray accesses."
            : found.verdict === "REFUTED"
              ? "Refuted."
              : "Not all of it was decided.",
        ),
        el("p", { class: "lede" }, shown.certificate ?? "", found.assumed ? `; assumed: ${found.assumed}` : ""),
        el(
          "section",
          {},
          el("h2", {}, "What was looked at"),
          el(
            "div",
            { class: "scroll" },
            el(
              "table",
              {},
              el(
                "thead",
                {},
                el(
                  "tr",
                  {},
                  ["part", "verdict", "facts"].map((name) => el("th", {}, name)),
                ),
              ),
              el(
                "tbody",
                {},
                parts.map((part) =>
                  el(
                    "tr",
                    {},
                    el("td", { class: "mono" }, tail(part.name, 60)),
                    el("td", { class: part.verdict === "PROVEN" ? "yes" : "no" }, part.verdict),
                    el("td", {}, part.facts.map(([what, count]) => `${whole(count)} ${what}`).join(", ")),
                  ),
                ),
              ),
            ),
          ),
        ),
        listed(
          "Counterexamples",
          parts.flatMap((part) =>
            part.counterexamples.map((one) => `${one.rule} in ${one.kernel || part.name}: ${one.reason}`),
          ),
        ),
        listed(
          "Not seen",
          parts.flatMap((part) => part.notes.map((note) => `${part.name}: ${note}`)),
        ),
        listed(
          "Not decided",
          parts.flatMap((part) => part.unknown.map((reason) => `${part.name}: ${reason}`)),
        ),
      ),
    ],
  };
}

function cudaView() {
  const numbers = [...new Set(kernels.map((kernel) => kernel.module))].sort((a, b) => a - b);
  const text = el("pre", {
    class: "list",
    tabindex: "0",
    style: { margin: "0", padding: "16px 20px", overflow: "auto", "white-space": "pre" },
    "aria-label": "CUDA text",
  });
  const head = el("span", { class: "grow" });
  let number = numbers[0];
  const refresh = () => {
    const whole = moduleText(number);
    const lines = searched
      ? whole
          .split("\n")
          .map((line, at) => `${String(at + 1).padStart(6)}  ${line}`)
          .filter((line) => line.toLowerCase().includes(searched))
      : null;
    text.textContent = lines ? lines.join("\n") : whole;
    head.textContent = lines
      ? `${counted(lines.length, "line")} found`
      : `${counted(whole.split("\n").length, "line")}. A stage's own function stands with the stage, in the panel.`;
  };
  const pick = el(
    "select",
    {
      "aria-label": "Module",
      onchange: (event) => {
        number = Number(event.target.value);
        refresh();
      },
    },
    numbers.map((one) =>
      el(
        "option",
        { value: one },
        `module ${one + 1}: ${counted(kernels.filter((kernel) => kernel.module === one).length, "kernel")}`,
      ),
    ),
  );
  return { nodes: [el("div", { class: "listhead" }, el("h2", {}, "CUDA text"), head, pick), text], refresh };
}
