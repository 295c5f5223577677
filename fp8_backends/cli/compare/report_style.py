"""The style sheet of `report.html`."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fcfcfb; --card: #ffffff; --ink: #1b1d21; --ink-2: #5b616b; --rule: #e4e5e3; --rule-2: #f0f0ee;
  --good: #1a7f4b; --bad: #c0352b; --band: #8a909a;
  --reference: #3c4048; --c1: #2f6fde; --c2: #e0762b; --c3: #1f9d77; --c4: #a146c4; --c5: #c9a20b; --c6: #d0437e;
  --c7: #3aa6c9;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15171a; --card: #1c1f23; --ink: #e9eaec; --ink-2: #a0a6b0; --rule: #30343a; --rule-2: #262a2f;
    --good: #4cc38a; --bad: #f0776c; --band: #6d747f;
    --reference: #d5d8dd; --c1: #6ea1ff; --c2: #f59a57; --c3: #4cc9a0; --c4: #c983e8; --c5: #e3c34c; --c6: #f07fae;
    --c7: #6fcbe8;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums;
}
main { max-width: 1120px; margin: 0 auto; padding: 48px 24px 80px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -0.015em; margin: 0 0 6px; font-weight: 650; }
h2 { font-size: 19px; letter-spacing: -0.005em; margin: 0 0 16px; font-weight: 620; }
h3 { font-size: 15px; margin: 0 0 8px; font-weight: 620; }
section { margin-top: 52px; }
.machine { color: var(--ink-2); margin: 0; }
.badge { display: inline-block; margin: 12px 0 0; padding: 3px 12px; border-radius: 99px; color: var(--c2);
  border: 1px solid var(--c2); font-size: 14px; }
.aside { color: var(--ink-2); font-size: 14px; max-width: 72ch; margin: 10px 0 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 14px; margin-top: 28px; }
.tile { background: var(--card); border: 1px solid var(--rule); border-radius: 12px; padding: 18px 20px; }
.tile .value { font-size: clamp(19px, 2.4vw, 25px); font-weight: 640; letter-spacing: -0.01em; }
.tile .label { color: var(--ink-2); font-size: 14px; }
.tile.good .value { color: var(--good); } .tile.bad .value { color: var(--bad); }
.scroll { overflow-x: auto; border: 1px solid var(--rule); border-radius: 12px; background: var(--card); }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { padding: 10px 8px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule-2); }
th { color: var(--ink-2); font-weight: 550; font-size: 13px; white-space: normal; vertical-align: bottom;
  border-bottom: 1px solid var(--rule); line-height: 1.3; }
tbody tr:last-child td { border-bottom: 0; }
th.backend, td.backend { text-align: left; }
td.backend { font-weight: 600; position: sticky; left: 0; background: var(--card); }
td.backend small { display: block; font-weight: 400; color: var(--ink-2); white-space: normal; min-width: 24ch;
  max-width: 34ch; margin-left: 18px; line-height: 1.35; }
td.muted { color: var(--ink-2); }
.chip { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 8px; }
.chart { overflow-x: auto; background: var(--card); border: 1px solid var(--rule); border-radius: 12px;
  padding: 16px 16px 12px; }
.chart + .aside + h3, .aside + h3 { margin-top: 28px; }
svg { display: block; width: 100%; min-width: 560px; height: auto; font: 12px system-ui, sans-serif; }
svg text { fill: var(--ink-2); }
svg .row-label { fill: var(--ink); font-size: 13px; font-weight: 550; }
svg .value { fill: var(--ink); font-size: 13px; }
svg .grid { stroke: var(--rule); stroke-width: 1; }
svg .zero { stroke: var(--ink-2); stroke-width: 1.2; }
svg .bound { stroke: var(--bad); stroke-width: 1.4; stroke-dasharray: 5 4; }
svg .spread { fill: var(--band); opacity: .16; }
svg .curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
svg .band { opacity: .10; }
svg .interval { fill: none; stroke-width: 2; }
svg .seed { opacity: .38; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 6px 20px; padding: 0; margin: 0 0 10px;
  font-size: 14px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 14px; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 12px; padding: 16px 18px; }
.checks { list-style: none; margin: 0; padding: 0; font-size: 14px; }
.checks li { display: flex; gap: 10px; padding: 5px 0; line-height: 1.4; }
.checks small { display: block; color: var(--ink-2); font-size: 12.5px; overflow-wrap: anywhere; }
.mark { font-weight: 700; } .pass .mark { color: var(--good); } .fail .mark { color: var(--bad); }
.fail { color: var(--bad); }
.ran { margin-bottom: 18px; font-size: 14px; } .ran ul { margin: 4px 0; padding-left: 20px; }
code { font: 13px ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
summary { cursor: pointer; color: var(--ink-2); }
.reading { padding-left: 20px; max-width: 76ch; } .reading li { margin: 6px 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 24px; margin: 0; font-size: 14px; }
dt { color: var(--ink-2); } dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 640px) {
  main { padding: 28px 16px 56px; } h1 { font-size: 25px; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: 8px; }
}
"""
