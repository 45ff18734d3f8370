"""Forty prompts of many kinds and lengths, for comparing whole generations."""

from __future__ import annotations

_STORY = (
    "The ferry left the harbour a little before six, when the lamps along the quay were still "
    "burning and the gulls had not yet begun to quarrel over the nets. Marta stood at the rail "
    "with her collar turned up and watched the town become small. She had promised herself that "
    "she would not look for the yellow house, and she looked for it anyway. "
)
_REPORT = (
    "Quarterly maintenance report. Pump 3 was taken out of service on the 14th because of rising "
    "vibration at the drive end. The bearing was replaced and the shaft realigned; readings fell "
    "from 7.1 to 1.8 mm/s. Pump 4 continues to run hot under full load. The cooling circuit was "
    "flushed, which lowered the temperature by six degrees, but the cause is not yet known. "
)

PROMPTS: tuple[str, ...] = (
    "The capital of France is",
    "Once upon a time",
    "Q: What is 17 + 25?\nA:",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\ndef softmax(x):\n",
    "The three laws of motion are:\n1.",
    "Dear Sir or Madam,\n\nI am writing to",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "Translate to French: Good morning, how are you?\n",
    "To be, or not to be,",
    "Ingredients:\n- 200 g flour\n- 3 eggs\n-",
    "Photosynthesis is the process by which",
    "A",
    "1, 1, 2, 3, 5, 8,",
    "The mitochondria",
    "Breaking news:",
    "In 1969, the first humans",
    "int main(void) {\n    printf(",
    "<html>\n<head>\n<title>",
    '{"name": "Alice", "age": 30, "city":',
    "| Country | Capital |\n|---|---|\n| Spain | Madrid |\n|",
    "User: My computer does not start. What should I do?\nAssistant:",
    "Roses are red,\nViolets are blue,\n",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "Es war einmal ein König,",
    "El perro de mi vecina",
    "Le petit chat est assis sur",
    "日本の首都は",
    "Привет, как",
    "Emoji test 🙂🚀🎉 means",
    "naïve café déjà vu: these words",
    "E = mc^2 was published by",
    "Water boils at 100 degrees Celsius at sea level because",
    "Abstract. We present a method for",
    "Step 1: Open the box. Step 2: Remove the",
    "\n\n\nChapter One\n\n",
    "    indented text keeps its    spaces   ",
    _STORY * 2 + "When the engine stopped,",
    _REPORT * 4 + "Summary of the report in one sentence:",
    "List of prime numbers: 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, " * 3 + "53,",
)

assert len(PROMPTS) == 40
