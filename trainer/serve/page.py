"""A small page to try the model in a browser. It loads nothing from other servers."""

from __future__ import annotations

import html
import json
from string import Template

_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>$name</title>
<style nonce="$nonce">
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
textarea { width: 100%; box-sizing: border-box; font: inherit; height: 7rem; }
label { display: inline-block; margin: .5rem 1rem .5rem 0; }
input { font: inherit; width: 5rem; }
#key { width: 14rem; }
button { font: inherit; padding: .2rem 1rem; margin: .5rem .3rem .5rem 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f4f4f4; padding: 1rem; min-height: 4rem; }
#state { color: #666; }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd; }
  pre { background: #222; } #state { color: #aaa; } }
</style></head><body>
<h1>$name</h1>
<label for="prompt">$ask</label>
<textarea id="prompt" autofocus></textarea>
<div>
<label>Tokens <input id="max_tokens" type="number" value="64" min="1"></label>
<label>Temperature <input id="temperature" type="number" value="0.8" min="0" step="0.1"></label>
<label>Top-k <input id="top_k" type="number" value="40" min="0"></label>
<label>Top-p <input id="top_p" type="number" value="1" min="0" max="1" step="0.05"></label>
<label>Seed <input id="seed" type="number"></label>
<label>API key, if needed <input id="key" type="password" autocomplete="off"></label>
</div>
<button id="go">Generate</button> <button id="stop" disabled>Stop</button> <span id="state" role="status"></span>
<pre id="text" aria-live="polite"></pre>
<script nonce="$nonce">
const model = $model;
const at = (id) => document.getElementById(id);
let control = null;
function body() {
  const made = { model, prompt: at("prompt").value, stream: true, stream_options: { include_usage: true } };
  for (const id of ["max_tokens", "temperature", "top_k", "top_p", "seed"])
    if (at(id).value !== "") made[id] = Number(at(id).value);
  return JSON.stringify(made);
}
function show(line) {
  if (line === "[DONE]") return;
  const event = JSON.parse(line);
  if (event.error) throw new Error(event.error.message);
  for (const choice of event.choices) at("text").append(choice.text);
  if (event.usage) at("state").textContent = event.usage.completion_tokens + " tokens";
}
async function generate() {
  control = new AbortController();
  at("go").disabled = true; at("stop").disabled = false;
  at("state").textContent = "..."; at("text").textContent = "";
  const headers = { "Content-Type": "application/json" };
  if (at("key").value) headers.Authorization = "Bearer " + at("key").value;
  try {
    const answer = await fetch("/v1/completions", { method: "POST", headers, body: body(), signal: control.signal });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const parts = (rest + value).split("\\n\\n");
      rest = parts.pop();
      for (const part of parts) show(part.replace(/^data: /, ""));
    }
  } catch (error) {
    at("state").textContent = error.name === "AbortError" ? "stopped" : error.message;
  }
  at("go").disabled = false; at("stop").disabled = true;
}
at("go").addEventListener("click", generate);
at("stop").addEventListener("click", () => control && control.abort());
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) generate();
});
const initial = new URLSearchParams(location.search).get("prompt");
if (initial !== null) { at("prompt").value = initial; generate(); }
</script></body></html>
""")


def page(name: str, nonce: str, *, glm: bool) -> str:
    """Return the page of a model as HTML."""
    ask = "Text with [MASK], [sMASK] or [gMASK]:" if glm else "Text to continue:"
    # Escape "<", so that a name cannot end the script element.
    model = json.dumps(name).replace("<", "\\u003c")
    return _PAGE.substitute(name=html.escape(name), nonce=nonce, ask=html.escape(ask), model=model)
