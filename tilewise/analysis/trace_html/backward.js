// The backward pass: what is added to dq, dk and dv, and one pair in full.

function backwardSentence(here) {
  if (here.kind === "delta") return "Before the tiles: delta = do · out, one number for each query.";
  const kind = recording().classes[here.i][here.j] === FULL ? "full" : "partial";
  return `${queriesText(here.i)} meet ${keysText(here.j)} again (${kind}): ds is added up into dq and dk, p into dv.`;
}

function doOut(row) {
  const out = vector(recording().out, row);
  return vector(whole.do, row).reduce((total, x, d) => total + x * out[d], 0);
}

function deltaTable() {
  const body = node("tbody");
  for (let row = 0; row < numQueries; row++) {
    const line = node("tr", { className: row === view.row ? "chosen" : "" }, [
      node("th", { scope: "row", textContent: String(row) }),
      cell(at(recording().lse, row), { name: "lse" }), cell(at(whole.delta, row), { name: "delta" }), cell(doOut(row), { name: "do-out" }),
    ]);
    line.dataset.row = String(row);
    body.append(line);
  }
  return node("table", {}, [headers(["query", "lse", "delta = Σ p dp over all keys", "the same as do · out"]), body]);
}

function strips(names, tile, first, end, chosen, attribute) {
  const shades = names.map((name) => scale("signed", largest(recording()[name])));
  const final = recording()[names[0]].shape[0] - 1;
  const body = node("tbody");
  for (let n = first; n < end; n++) {
    const line = node("tr", { className: n === chosen ? "chosen" : "" }, [node("th", { scope: "row", textContent: String(n) })]);
    line.dataset[attribute] = String(n);
    if (attribute === "row") line.append(cell(at(recording().lse, n), { name: "lse" }), cell(at(whole.delta, n), { name: "delta" }));
    names.forEach((name, which) => {
      [["before", tile - 1], ["after", tile], ["final", final]].forEach(([when, place]) => {
        const td = node("td", { className: "pic" }, [strip(gradientAfter(name, place, n), shades[which], `${name} ${when}`)]);
        td.dataset.name = `${name}-${when}`;
        line.append(td);
      });
    });
    body.append(line);
  }
  const heads = attribute === "row" ? ["query", "lse", "delta"] : ["key"];
  names.forEach((name) => heads.push(`|${name} before`, `|${name} after`, `|${name} final`));
  return node("table", {}, [headers(heads), body]);
}

function backwardTable() {
  const here = step(), title = document.getElementById("state-title"), target = document.getElementById("state");
  if (here.kind === "delta") {
    title.textContent = "One number for each query, instead of a row of the matrix";
    target.replaceChildren(deltaTable());
    document.getElementById("state-legend").replaceChildren();
    return;
  }
  title.textContent = "What the tile adds to: dq of its queries, dk and dv of its keys";
  const [r0, r1] = rowsOf(here.i), [k0, k1] = keysOf(here.j);
  target.replaceChildren(node("div", { className: "pair" }, [
    strips(["dq"], here.j, r0, r1, view.row, "row"), strips(["dk", "dv"], here.i, k0, k1, view.key, "key"),
  ]));
  legend(document.getElementById("state-legend"), scale("signed", largest(recording().dq)),
    `dq; dk reaches ${fmt(largest(recording().dk), 3)}, dv ${fmt(largest(recording().dv), 3)} on scales of their own`);
}

function backwardPair() {
  const here = step(), { row, key } = view, panel = document.getElementById("row-panel");
  const p = at(whole.p, row, key), dp = at(whole.dp, row, key), ds = at(whole.ds, row, key), delta = at(whole.delta, row);
  const terms = trace.words.scores === "none" ? "" : " · slope of the score terms";
  document.getElementById("row-title").textContent = here.kind === "delta" ? `Query ${row}` : `Query ${row}, key ${key}`;
  const parts = [["delta", `Σ p dp over all keys; the same as do · out  =  ${fmt(doOut(row))};  delta`, delta]];
  if (here.kind !== "delta") {
    const hidden = isHidden(row, key);
    parts.unshift(["p", hidden ? "the pair is hidden" : `exp(${fmt(at(whole.scores, row, key))} − ${fmt(at(recording().lse, row))})`, p], ["dp", "do · v", dp]);
    parts.push(["ds", hidden ? "the pair is hidden" : `p (dp − delta)${terms}  =  ${fmt(p)} · (${fmt(dp)} − ${fmt(delta)})${terms ? " · slope" : ""}`, ds]);
    parts.push(["dq", "dq + scale · Σ ds k, over the keys of the tile"], ["dk", "dk + scale · Σ ds q, over the queries of the tile"], ["dv", "dv + Σ p do"]);
  }
  panel.replaceChildren(sums(parts));
  if (here.kind === "delta") return;
  const rec = recording();
  [["dq", here.j, row, `dq of query ${row}`], ["dk", here.i, key, `dk of key ${key}`], ["dv", here.i, key, `dv of key ${key}`]].forEach(([name, tile, index, text]) => {
    const now = gradientAfter(name, tile, index), final = gradientAfter(name, rec[name].shape[0] - 1, index);
    panel.append(node("figure", {}, [
      bars(now, final, `${text}: so far against final, largest distance ${fmt(distance(now, final))}`),
      node("figcaption", { textContent: `${text}: filled so far, outlined final` }),
    ]));
  });
}
