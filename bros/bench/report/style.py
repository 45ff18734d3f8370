"""How the page looks, on light and dark screens, wide and narrow ones."""

STYLE = """
:root{--ink:#1c2024;--dim:#5a626b;--paper:#fff;--line:#d9dde2;--soft:#f4f6f8;--warn:#fff4e0;
--edge:#e69f00}
@media (prefers-color-scheme:dark){:root{--ink:#e6e8eb;--dim:#a0a8b1;--paper:#16191d;
--line:#34393f;--soft:#1f242a;--warn:#33290f;--edge:#e69f00}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1150px;margin:0 auto;padding:1.2rem}
h1{font-size:clamp(1.2rem,3.2vw,1.7rem);line-height:1.35;margin:.4rem 0 .8rem}
h2{font-size:1.15rem;margin:2rem 0 .5rem}
h4{margin:1rem 0 .2rem}
p,ul{margin:.3rem 0;max-width:54rem}
ul{padding-left:1.2rem}
.lead{font-size:1.05rem}
.warnings{background:var(--warn);border-left:4px solid var(--edge);padding:.6rem 1rem;
margin:1rem 0;border-radius:4px;overflow-wrap:anywhere}
.warnings h2{margin:0 0 .2rem;font-size:1rem}
.wide{overflow-x:auto;margin:.5rem 0}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.28rem .7rem;text-align:right;border-bottom:1px solid var(--line);
vertical-align:bottom}
thead th{color:var(--dim);font-weight:600;min-width:4.2rem}
tbody th{font-weight:500;white-space:nowrap}
th:first-child{text-align:left;position:sticky;left:0;background:var(--paper)}
.start th,.start td{border-top:2px solid var(--dim)}
.figures td{white-space:nowrap}
.settings td,.settings th{text-align:left;vertical-align:top}
.settings td{max-width:22rem;overflow-wrap:anywhere}
.marked td,.marked th{background:var(--soft)}
.marked td{font-weight:600}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,24rem),1fr));
gap:1rem;align-items:start}
.plots img{width:100%;height:auto;border:1px solid var(--line);border-radius:6px;display:block}
details{border:1px solid var(--line);border-radius:6px;padding:.4rem .8rem;margin:.4rem 0}
summary{cursor:pointer;font-weight:600}
"""
