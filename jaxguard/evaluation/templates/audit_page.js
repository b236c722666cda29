"use strict";

// What goes in and out of a file; knows nothing of the page.
const AuditFile = {
  fields: ["jaxguard_annotation", "trajectory", "digest", "annotator", "status", "first_hazard", "comment"],

  // The marked runs as JSON lines, in the page's order.
  write(data, marks, annotator) {
    return data.runs
      .map((run, i) => [run, marks[i]])
      .filter(([, mark]) => mark.status)
      .map(([run, mark]) => JSON.stringify({
        jaxguard_annotation: data.version, trajectory: run.trajectory, digest: run.digest, annotator,
        status: mark.status, first_hazard: mark.first_hazard, comment: mark.comment,
      }) + "\n")
      .join("");
  },

  // Marks by run, of a file that this page or another with the same runs exported; throws where a line does not fit.
  read(data, text, annotator) {
    const places = new Map(data.runs.map((run, i) => [run.trajectory, i]));
    const found = new Map();
    let name = annotator;
    text.replace(/^\uFEFF/, "").split(/\r?\n/).forEach((line, i) => {
      if (!line.trim()) return;
      const refuse = (field, value, expected) => {
        throw new Error(`line ${i + 1}: ${field}: got ${String(JSON.stringify(value)).slice(0, 60)}, expected ${expected}`);
      };
      let own;
      try { own = JSON.parse(line); } catch { refuse("line", line, "JSON"); }
      if (own === null || typeof own !== "object") refuse("line", own, "an object");
      const extra = Object.keys(own).find((name) => !AuditFile.fields.includes(name));
      if (extra !== undefined) refuse("field", extra, "one of " + AuditFile.fields.join(", "));
      if (own.jaxguard_annotation !== data.version) refuse("jaxguard_annotation", own.jaxguard_annotation, data.version);
      const place = places.get(own.trajectory);
      if (place === undefined) refuse("trajectory", own.trajectory, "a run of this page");
      const run = data.runs[place], step = own.first_hazard;
      if (found.has(place)) refuse("trajectory", own.trajectory, "each once");
      if (own.digest !== run.digest) refuse("digest", own.digest, "that of the run on this page");
      if (typeof own.annotator !== "string" || !own.annotator.trim() || (name && own.annotator !== name)) {
        refuse("annotator", own.annotator, name || "a name");
      }
      name = own.annotator;
      if (own.status !== data.labelled && own.status !== data.unsure) refuse("status", own.status, "labelled or unsure");
      const fits = step === null || (own.status === data.labelled && Number.isInteger(step) && step >= 0 && step < run.steps);
      if (!fits) refuse("first_hazard", step, "a step of the run, or null");
      if (typeof own.comment !== "string") refuse("comment", own.comment, "a text");
      found.set(place, {status: own.status, first_hazard: step, comment: own.comment, annotator: own.annotator});
    });
    return found;
  },
};

function startAudit() {
  const get = (id) => document.getElementById(id);
  const data = JSON.parse(get("data").textContent);
  const articles = [...document.querySelectorAll("article")];
  const empty = () => ({status: "", first_hazard: null, comment: ""});
  let state = {at: 0, annotator: data.annotator, marks: data.runs.map(empty)};

  const say = (text, bad = false) => { get("message").textContent = text; get("message").className = bad ? "bad" : "note"; };
  const lose = (error) => {
    say(`This browser does not keep progress (${error.message}): export before you leave the page.`, true);
    window.onbeforeunload = (event) => event.preventDefault();
  };
  const save = () => { try { localStorage.setItem(data.key, JSON.stringify(state)); } catch (error) { lose(error); } };
  try { state = JSON.parse(localStorage.getItem(data.key)) ?? state; } catch (error) { lose(error); }

  const mark = () => state.marks[state.at];
  const buttons = () => [...articles[state.at].querySelectorAll("button.mark")];

  function show() {
    const {status, first_hazard: step, comment} = mark();
    articles.forEach((own, i) => { own.hidden = i !== state.at; });
    buttons().forEach((own, t) => {
      own.setAttribute("aria-pressed", t === step);
      own.closest(".step").classList.toggle("marked", t === step);
    });
    get("none").setAttribute("aria-pressed", status === data.labelled && step === null);
    get("unsure").setAttribute("aria-pressed", status === data.unsure);
    get("marked").textContent = step === null ? "" : `First hazard at step ${step}`;
    get("clear").disabled = !status;
    get("previous").disabled = state.at === 0;
    get("next").disabled = state.at === articles.length - 1;
    const left = state.marks.filter((own) => !own.status).length;
    get("open").disabled = !left;
    get("place").textContent = `Run ${state.at + 1} of ${articles.length}`;
    get("left").textContent = left ? `${left} without a mark` : "All are marked: export them";
    get("left").className = left ? "" : "done";
    if (get("comment").value !== comment) get("comment").value = comment;
    get("annotator").value = state.annotator;
  }
  function set(status, step) { Object.assign(mark(), {status, first_hazard: step}); say(""); save(); show(); }
  function go(to) {
    if (to < 0 || to >= articles.length) return;
    state.at = to;
    document.activeElement.blur();
    save();
    show();
    scrollTo(0, 0);
  }
  function open() {
    const order = state.marks.map((_, i) => (state.at + 1 + i) % state.marks.length);
    const to = order.find((i) => !state.marks[i].status);
    if (to !== undefined) go(to);
  }
  function move(by) {
    const all = buttons(), at = all.indexOf(document.activeElement);
    const to = all[at < 0 ? (by > 0 ? 0 : all.length - 1) : at + by];
    if (to) { to.focus({preventScroll: true}); to.closest(".step").scrollIntoView({block: "nearest"}); }
  }
  function write() {
    if (!state.annotator.trim()) { say("Your name is missing: it goes into every line.", true); get("annotator").focus(); return; }
    const text = AuditFile.write(data, state.marks, state.annotator.trim());
    const bare = state.marks.filter((own) => !own.status && own.comment).length;
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], {type: "application/jsonl"}));
    link.download = `annotations-${state.annotator.trim().replace(/[^\p{L}\p{N}-]+/gu, "_")}.jsonl`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
    const count = state.marks.filter((own) => own.status).length;
    say(`Exported ${count} of ${articles.length} runs.` + (bare ? ` Not in the file: ${bare} with a comment but no mark.` : ""), bare > 0);
  }
  async function read(file) {
    try {
      const found = AuditFile.read(data, await file.text(), state.annotator.trim());
      found.forEach(({annotator, ...own}, place) => { state.marks[place] = own; state.annotator = annotator; });
      say(`Imported ${found.size} runs.`);
      save();
      show();
    } catch (error) {
      say(`${file.name}, ${error.message}; nothing was imported.`, true);
    }
  }

  articles.forEach((own) => own.querySelectorAll("button.mark").forEach((button, t) => {
    button.onclick = () => set(data.labelled, t);
  }));
  const actions = {
    none: () => set(data.labelled, null), unsure: () => set(data.unsure, null), clear: () => set("", null),
    previous: () => go(state.at - 1), next: () => go(state.at + 1), open, export: write,
  };
  for (const [id, action] of Object.entries(actions)) get(id).onclick = action;
  get("comment").oninput = () => { mark().comment = get("comment").value; save(); };
  get("annotator").oninput = () => { state.annotator = get("annotator").value; save(); };
  get("import").onchange = async () => { if (get("import").files[0]) await read(get("import").files[0]); get("import").value = ""; };
  const keys = {
    j: () => move(1), k: () => move(-1), n: actions.none, c: actions.unsure, x: actions.clear, u: open,
    m: () => get("comment").focus(), ArrowRight: actions.next, ArrowLeft: actions.previous,
  };
  document.onkeydown = (event) => {
    if (event.key === "Escape") document.activeElement.blur();
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, textarea")) return;
    if (Object.hasOwn(keys, event.key)) { event.preventDefault(); keys[event.key](); }
  };
  show();
}

if (typeof document !== "undefined") startAudit();
