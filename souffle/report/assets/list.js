// A list of any length: rows have known heights, and only those that can be seen are in the page.

class LongList {
  // `rows` are drawn by `draw(row, index)`; `opens(row)` says what a row selects; `drawn(first, last)` is told what can be seen.
  constructor({ label, height, draw, select, toggle, drawn, role = "listbox", kind = "" }) {
    Object.assign(this, { height, draw, select, toggle, drawn });
    this.rows = [];
    this.tops = [0];
    this.current = -1;
    this.itemRole = role === "tree" ? "treeitem" : "option";
    this.space = el("div", { class: "space", role: "presentation" });
    this.node = el(
      "div",
      {
        class: `list ${kind}`,
        tabindex: "0",
        role,
        "aria-label": label,
        onscroll: () => this.later(),
        onkeydown: (event) => this.key(event),
        onfocus: () => this.entered(),
      },
      this.space,
    );
    this.id = `row${LongList.count++}`;
    this.pending = false;
    this.nodes = new Map();
    new ResizeObserver(() => this.paint()).observe(this.node);
  }

  // By the keyboard: to draw anew under a mouse that is held would take the row away that it is about to click.
  entered() {
    if (this.current < 0 && this.rows.length && this.node.matches(":focus-visible")) this.move(0, false);
  }

  show(rows, keep = null) {
    this.rows = rows;
    this.tops = [0];
    for (const row of rows) this.tops.push(this.tops.at(-1) + this.height(row));
    this.space.style.height = `${this.tops.at(-1)}px`;
    this.current = keep === null ? -1 : rows.findIndex(keep);
    this.paint();
  }

  later() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.paint(true);
    });
  }

  // The row that begins last at or before a height.
  at(y) {
    let low = 0;
    let high = this.rows.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.tops[middle] <= y) low = middle;
      else high = middle;
    }
    return low;
  }

  // Draw what can be seen; where only the place changed, rows that are drawn already stay.
  paint(moved = false) {
    const seen = this.node.clientHeight;
    if (!seen) return;
    const first = Math.max(0, this.at(this.node.scrollTop) - 4);
    const last = Math.min(this.rows.length, this.at(this.node.scrollTop + seen) + 5);
    if (moved && first === this.first && last === this.last) return;
    [this.first, this.last] = [first, last];
    const before = moved ? this.nodes : new Map();
    this.nodes = new Map();
    for (let index = first; index < last; index++) this.nodes.set(index, before.get(index) ?? this.made(index));
    this.space.replaceChildren(...this.nodes.values());
    if (this.current >= 0) this.node.setAttribute("aria-activedescendant", `${this.id}-${this.current}`);
    else this.node.removeAttribute("aria-activedescendant");
    this.drawn?.(first, last);
  }

  made(index) {
    const node = this.draw(this.rows[index], index);
    node.classList.add("row");
    node.id = `${this.id}-${index}`;
    node.setAttribute("role", this.itemRole);
    node.setAttribute("aria-selected", String(index === this.current));
    node.setAttribute("aria-setsize", this.rows.length);
    node.setAttribute("aria-posinset", index + 1);
    node.style.top = `${this.tops[index]}px`;
    node.style.height = `${this.tops[index + 1] - this.tops[index]}px`;
    node.addEventListener("click", (event) => this.click(index, event));
    return node;
  }

  click(index, event) {
    if (event.target.closest("[data-twist]")) {
      this.current = index;
      this.toggle(this.rows[index]);
      return;
    }
    this.move(index);
  }

  move(index, open = true) {
    this.current = Math.max(0, Math.min(this.rows.length - 1, index));
    this.reveal(this.current);
    this.paint();
    if (open) this.select(this.rows[this.current]);
  }

  reveal(index) {
    const [top, end] = [this.tops[index], this.tops[index + 1]];
    const seen = this.node.clientHeight;
    if (top < this.node.scrollTop + 40) this.node.scrollTop = Math.max(0, top - 40);
    else if (end > this.node.scrollTop + seen - 24) this.node.scrollTop = end - seen + 24;
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.node.clientHeight / 30) - 1);
    const steps = {
      ArrowDown: 1,
      ArrowUp: -1,
      PageDown: page,
      PageUp: -page,
      Home: -this.rows.length,
      End: this.rows.length,
    };
    if (event.ctrlKey || event.altKey || event.metaKey || !this.rows.length) return;
    if (event.key in steps) this.move(this.current + steps[event.key]);
    else if (this.toggle && (event.key === "ArrowLeft" || event.key === "ArrowRight") && this.current >= 0) {
      this.toggle(this.rows[this.current], event.key === "ArrowRight");
    } else if (event.key === "Enter" || event.key === " ") {
      if (this.current >= 0) this.select(this.rows[this.current], true);
    } else return;
    event.preventDefault();
  }
}
LongList.count = 0;
