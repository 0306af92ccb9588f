"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const make = (tag, text = "", properties = {}) => Object.assign(document.createElement(tag), { textContent: text }, properties);
  const brief = (x) => {
    const v = Number(x);
    if (!Number.isFinite(v)) return Number.isNaN(v) ? "NaN" : v > 0 ? "∞" : "−∞";
    return Number(v.toPrecision(3)).toString().replaceAll("-", "−");
  };

  // ---- tables: sort by a click or a key on a heading --------------------------------------------------------------

  const keyOf = (row, column, kind) => {
    let at = 0;  // a cell may span several columns
    for (const cell of row.cells) {
      at += cell.colSpan;
      if (at > column) {
        const text = cell.dataset.value ?? cell.textContent;
        return kind !== "text" ? (text === "" ? null : Number(text)) : Number.isNaN(Number(text)) ? text : Number(text);
      }
    }
    return null;
  };
  const rank = (value) => (value === null ? 2 : Number.isNaN(value) ? 1 : 0);  // what is missing comes last
  const compare = (a, b) => (typeof a === "string" || typeof b === "string" ? String(a).localeCompare(String(b)) : a - b);
  for (const table of all("table.sortable")) {
    const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
    const body = table.tBodies[0];
    const given = [...body.rows];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const first = head.dataset.kind !== "text" && column > 0 ? "descending" : "ascending";
      const second = first === "ascending" ? "descending" : "ascending";
      const now = head.getAttribute("aria-sort");
      const next = now === null ? first : now === first ? second : null;  // the third time: as it was
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      if (next === null) return body.append(...given);
      head.setAttribute("aria-sort", next);
      const sign = next === "ascending" ? 1 : -1;
      const keyed = given.map((row) => [keyOf(row, column, head.dataset.kind), row]);
      keyed.sort(([a], [b]) => rank(a) - rank(b) || (rank(a) ? 0 : sign * compare(a, b)));
      body.append(...keyed.map(([, row]) => row));
    }));
  }

  // ---- the contents bar leads to sections that are closed, too ----------------------------------------------------

  document.addEventListener("click", (event) => {
    const link = event.target.closest?.('a[href^="#"]');
    const place = link && $(decodeURIComponent(link.getAttribute("href").slice(1)));
    if (!place) return;
    const section = place.closest("details.section");
    if (section) section.open = true;
    if (document.URL !== "about:srcdoc") return;  // there, within a notebook, such a link would lead to the notebook
    event.preventDefault();
    all(".aimed").forEach((before) => before.classList.remove("aimed"));
    place.classList.add("aimed");
    place.scrollIntoView();
  });

  // ---- the picture: a page of its own, as high as it needs to be and no higher than the window ---------------------

  const unpack = async (text) => {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const lines = (await new Response(stream).text()).split("\n");
    const forms = lines.splice(0, Number(lines.shift()));
    return lines.map((line) => {
      const [form, ...numbers] = line.split(" ");
      return forms[form].replace(/\x01/g, () => numbers.shift());
    }).join("\n");
  };
  const frame = document.querySelector("#picture iframe");
  if (frame) {
    const folding = frame.closest("details");
    const needed = () => frame.contentDocument.body.getBoundingClientRect().height + 2;
    const fit = () => { frame.style.height = `${Math.min(innerHeight * 0.92, needed())}px`; };
    const grow = () => { if (needed() > frame.clientHeight) fit(); };
    const ready = () => {
      fit();
      new MutationObserver(grow).observe(frame.contentDocument.body, { childList: true, subtree: true });
    };
    folding.addEventListener("toggle", async () => {
      if (frame.hasAttribute("srcdoc")) return fit();
      frame.addEventListener("load", ready);
      frame.srcdoc = typeof DecompressionStream === "undefined" ? "This browser is too old to unpack the picture." : await unpack($("folding").textContent);
    });
    addEventListener("beforeprint", () => { if (frame.hasAttribute("srcdoc")) frame.style.height = `${needed()}px`; });
  }

  // ---- layers: histograms, heights by square root, so that tails can be seen --------------------------------------

  const histogram = (counts, kind) => {
    if (counts.length === 1) return histogram([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, counts[0], 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], kind);  // one value: a bar
    const most = Math.sqrt(Math.max(...counts));
    const width = 72 / counts.length;
    const bar = (count, k) => (count ? `M${(k * width).toFixed(2)} 20v${-Math.max(1, (20 * Math.sqrt(count)) / most).toFixed(2)}h${(width * 0.86).toFixed(2)}V20z` : "");
    return `<svg class="hist ${kind}" viewBox="0 0 72 20" width="72" height="20" aria-hidden="true"><path d="${counts.map(bar).join("")}"/></svg>`;
  };
  for (const cell of all("td[data-drawn]")) {
    const { drawn } = cell.dataset;
    const { histogram: counts } = data.layers[Number(cell.parentNode.id.slice("layer-".length))][drawn];
    if (counts.length) cell.insertAdjacentHTML("afterbegin", histogram(counts, drawn));
  }

  // ---- layers: filter ----------------------------------------------------------------------------------------------

  const layerRows = all("#layer-table tbody tr");
  const filterLayers = () => {
    const words = $("layer-filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const flag = $("flag-filter").value;
    let shown = 0;
    for (const row of layerRows) {
      const text = row.cells[0].textContent.toLowerCase();
      const flags = row.dataset.flags;
      const fits = words.every((word) => text.includes(word)) && (flag === "" || (flag === "*" ? flags !== "" : flags.split(" ").includes(flag)));
      row.hidden = !(fits && (!$("leaf-filter").checked || row.dataset.leaf === "1"));
      shown += !row.hidden;
    }
    $("layer-count").textContent = `${shown} of ${layerRows.length}`;
  };
  for (const id of ["layer-filter", "flag-filter", "leaf-filter"]) $(id).addEventListener("input", filterLayers);
  filterLayers();
  all('a[href^="#layer-"]').forEach((link) => link.addEventListener("click", () => {
    $("layers").open = true;
    $("layer-filter").value = $("flag-filter").value = "";
    $("leaf-filter").checked = false;
    filterLayers();
  }));

  // ---- a tip that follows the pointer ------------------------------------------------------------------------------

  const tip = document.body.appendChild(make("div", "", { id: "tip" }));
  tip.setAttribute("aria-hidden", "true");  // what it says is in the tables, too
  const tell = (event, text) => {
    tip.classList.toggle("shown", Boolean(text));
    if (!text) return;
    tip.textContent = text;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, document.documentElement.clientWidth - width - 4))}px`;
    tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18}px`;
  };
  document.addEventListener("pointermove", (event) => {
    const place = event.target.closest?.("[data-tip], .bars rect, .slot");
    if (!place) return event.target.id === "matrix" ? undefined : tell(event, "");
    tell(event, place.dataset.tip ?? place.getAttribute("aria-label") ?? about(Number(place.dataset.sample)));
  });
  for (const kind of ["pointerleave", "scroll"]) document.addEventListener(kind, (event) => tell(event, ""));

  // ---- samples -----------------------------------------------------------------------------------------------------

  const samples = data.samples;
  const labelOf = (k) => samples.labels?.[k] ?? "";
  const about = (k) => `sample ${samples.ids[k]}${labelOf(k) && `, ${labelOf(k)}`}: norm ${brief(samples.norms[k])}, loss ${brief(data.losses[k])}`;
  let picked = null;
  const listeners = [];
  const pick = (k) => {
    picked = k === picked ? null : k;
    $("picker").value = picked === null ? "" : String(picked);
    for (const thing of all(".chosen")) thing.classList.remove("chosen");
    if (picked !== null) for (const thing of all(`[data-sample="${picked}"]:not(button)`)) thing.classList.add("chosen");
    showPicked();
    listeners.forEach((listener) => listener());
  };
  const list = (title, rows) => {
    const box = make("div");
    box.append(make("h3", title), make("ol"));
    for (const [left, right] of rows) {
      const item = make("li");
      item.append(left, make("span", right));
      box.lastChild.append(item);
    }
    return box;
  };
  const link = (k) => {
    const button = make("button", `sample ${samples.ids[k]}`, { type: "button" });
    button.addEventListener("click", () => pick(k));
    return button;
  };
  const showPicked = () => {
    const box = $("picked");
    box.replaceChildren();
    if (picked === null) return;
    const place = samples.norms.filter((norm) => Number(norm) > Number(samples.norms[picked])).length + 1;
    box.append(list(`Sample ${samples.ids[picked]}${labelOf(picked) && `, ${labelOf(picked)}`}`, [
      ["loss", brief(data.losses[picked])],
      ["gradient norm", brief(samples.norms[picked])],
      ["place by norm", `${place} of ${samples.ids.length}`],
    ]));
    const at = data.similarity?.rows.indexOf(picked) ?? -1;
    if (at >= 0) {
      const others = data.similarity.rows.map((k, i) => [k, Number(data.similarity.cosines[at][i])]);
      const sorted = others.filter(([k, cosine]) => k !== picked && !Number.isNaN(cosine)).sort((a, b) => b[1] - a[1]);
      if (sorted.length) {
        box.append(list("Most alike", sorted.slice(0, 3).map(([k, cosine]) => [link(k), cosine.toFixed(2).replace("-", "−")])));
        box.append(list("Least alike", sorted.slice(-3).reverse().map(([k, cosine]) => [link(k), cosine.toFixed(2).replace("-", "−")])));
      }
    }
    const parts = samples.parts[picked];
    if (parts) box.append(list("Largest parts of its gradient", parts.map(([i, norm]) => [make("code", samples.parameters[i]), brief(norm)])));
  };
  if (samples) {
    samples.ids.forEach((id, k) => $("picker").append(make("option", `${id}${labelOf(k) && `, ${labelOf(k)}`}${samples.outliers.includes(k) ? " (outlier)" : ""}`, { value: String(k) })));
    $("picker").addEventListener("input", () => pick($("picker").value === "" ? picked : Number($("picker").value)));
    const step = (by) => pick(picked === null ? (by > 0 ? 0 : samples.ids.length - 1) : (picked + by + samples.ids.length) % samples.ids.length);
    $("before").addEventListener("click", () => step(-1));
    $("after").addEventListener("click", () => step(1));
    all(".bars rect, button.pick").forEach((thing) => thing.addEventListener("click", () => pick(Number(thing.dataset.sample))));
  }

  // ---- tokens ------------------------------------------------------------------------------------------------------

  const showTokens = () => {
    const { rows, norms, text, ahead, apart } = data.tokens;
    const extent = (values) => values.map(Number).filter(Number.isFinite).reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, 0]);
    const together = $("token-scale").value === "all";
    // Padding is zero by definition, and would take the colours' lower end.
    const scales = norms.map((row, i) => extent(row.filter((norm, position) => norm !== 0 && (!text || position + ahead < text[i].length))));
    const over = scales.reduce(([low, high], [l, h]) => [Math.min(low, l), Math.max(high, h)], [Infinity, 0]);
    const known = over[0] <= over[1];  // else there is no finite norm
    $("token-least").textContent = !together ? "least" : known ? brief(over[0]) : "";
    $("token-most").textContent = !together ? "most" : known ? brief(over[1]) : "no finite norm";
    const box = document.createDocumentFragment();
    rows.forEach((k, i) => {
      const line = make("div", "", { className: "line" });
      line.dataset.sample = k;
      line.classList.toggle("chosen", k === picked);
      const button = make("button", samples.ids[k], { type: "button", title: about(k) });
      button.setAttribute("aria-label", `Pick sample ${samples.ids[k]}`);
      button.addEventListener("click", () => pick(k));
      const paragraph = make("p");
      if (labelOf(k)) paragraph.append(make("span", labelOf(k), { className: "chip" }));
      const [low, high] = together ? over : scales[i];
      const strength = (norm) => (high > low ? Math.max(0, norm - low) / (high - low) : norm > 0 ? 0.5 : 0);
      const shown = text ? text[i] : norms[i].map((_, position) => String(position));
      shown.forEach((word, place) => {
        const position = place - ahead;
        const norm = Number(norms[i][position] ?? NaN);
        const token = make("bdi", word, { className: `token${text ? "" : " number"}` });
        if (position >= 0 && position < norms[i].length) {
          token.style.background = Number.isFinite(norm) ? `rgba(var(--coral-rgb), ${(0.75 * strength(norm)).toFixed(3)})` : "var(--bad-back)";
          token.dataset.tip = `${text ? `“${word}”, ` : ""}position ${position}: ${brief(norm)}`;
        } else {
          token.classList.add("plain");
        }
        if (apart && place) paragraph.append(" ");
        paragraph.append(token);
        if (!text) paragraph.append("\u200b");
      });
      line.append(button, paragraph);
      box.append(line);
    });
    $("token-map").replaceChildren(box);
  };
  if (data.tokens) {
    const { left, cut, rows } = data.tokens;
    $("token-note").textContent = [left ? `${rows.length} of ${left + rows.length} samples` : "", cut ? `the last ${cut} positions are not shown` : ""].filter(Boolean).join("; ");
    $("token-scale").addEventListener("input", showTokens);
    showTokens();
  }

  // ---- similarity --------------------------------------------------------------------------------------------------

  const matrix = $("matrix");
  if (matrix) {
    const { rows, cosines } = data.similarity;
    const size = rows.length;
    const pixels = Math.max(1, Math.floor(960 / size));
    matrix.width = matrix.height = size * pixels;
    let order = rows.map((_, i) => i);
    let cell = null;
    const chain = () => {  // from the first sample, always to the nearest that is left
      const left = new Set(rows.keys());
      const path = [];
      for (let now = 0; now !== undefined;) {
        path.push(now);
        left.delete(now);
        let best;
        for (const other of left) if (best === undefined || Number(cosines[now][other]) > Number(cosines[now][best])) best = other;
        now = best;
      }
      return path;
    };
    const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
    const paint = () => {
      const context = matrix.getContext("2d");
      const [coral, blue, line] = [colour("--coral-rgb"), colour("--blue-rgb"), colour("--purple")];
      context.clearRect(0, 0, matrix.width, matrix.height);
      order.forEach((i, y) => order.forEach((j, x) => {
        const cosine = Number(cosines[i][j]);
        context.fillStyle = Number.isNaN(cosine) ? colour("--grey") : `rgba(${cosine < 0 ? blue : coral}, ${Math.abs(cosine).toFixed(3)})`;
        context.fillRect(x * pixels, y * pixels, pixels, pixels);
      }));
      context.strokeStyle = line;
      context.lineWidth = Math.max(2, matrix.width / 240);
      const at = order.findIndex((i) => rows[i] === picked);
      if (at >= 0) {
        context.strokeRect(0, at * pixels, matrix.width, pixels);
        context.strokeRect(at * pixels, 0, pixels, matrix.height);
      }
      if (cell) context.strokeRect(cell[0] * pixels, cell[1] * pixels, pixels, pixels);
    };
    const words = ([x, y]) => `samples ${samples.ids[rows[order[y]]]} and ${samples.ids[rows[order[x]]]}: ${Number(cosines[order[y]][order[x]]).toFixed(2).replace("-", "−")}`;
    const under = (event) => {
      const box = matrix.getBoundingClientRect();
      const place = (at, start, length) => Math.max(0, Math.min(size - 1, Math.floor(((at - start) / length) * size)));
      return [place(event.clientX, box.left, box.width), place(event.clientY, box.top, box.height)];
    };
    matrix.addEventListener("pointermove", (event) => tell(event, words(under(event))));
    matrix.addEventListener("click", (event) => pick(rows[order[under(event)[1]]]));
    matrix.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (event.key === "Enter" && cell) return pick(rows[order[cell[1]]]);
      if (!move) return;
      event.preventDefault();
      cell = (cell ?? [0, 0]).map((at, axis) => Math.max(0, Math.min(size - 1, at + move[axis])));
      $("cell").textContent = words(cell);
      paint();
    });
    $("alike").addEventListener("input", () => {
      order = $("alike").checked ? chain() : rows.map((_, i) => i);
      cell = null;
      paint();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
    listeners.push(paint);
    paint();
  }
  addEventListener("beforeprint", () => all("details").forEach((part) => { part.open = true; }));
})();
