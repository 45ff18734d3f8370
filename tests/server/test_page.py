"""The web page of the server, as far as it works without a browser."""

from __future__ import annotations

import importlib.resources
import json
import re
import shutil
import subprocess

import pytest

_RUN = """
const events = eval("(" + process.argv[1] + ")");
(async () => {
  const found = [];
  for await (const event of events(new Response(process.argv[2]))) found.push(event);
  console.log(JSON.stringify(found));
})();
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_the_page_skips_heartbeats() -> None:
    page = importlib.resources.files("bros.server").joinpath("static/index.html")
    found = re.search(r"async function\* events.*?\n\}\n", page.read_text("utf-8"), re.DOTALL)
    assert found is not None
    stream = ': waiting\n\ndata: {"n": 1}\n\n: waiting\n\ndata: {"n": 2}\n\ndata: [DONE]\n\n'
    command = ["node", "-e", _RUN, found[0], stream]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == [{"n": 1}, {"n": 2}]
