"""Prompts for comparing whole generations.

PROMPTS are forty of many kinds and lengths. FAMILIES are prompts that begin alike.
"""

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

_RULES = (
    "You are the assistant of a small lending library by the sea. Be brief and friendly. Books may "
    "be kept for three weeks and renewed twice unless somebody else has asked for them. A late "
    "book costs ten cents a day, and never more than two euros. Children pay nothing. The reading "
    "room is open from nine to six, on Saturdays until one, and closed on Sundays. Films and "
    "records are kept for one week. Dogs are welcome if they are quiet. If you do not know an "
    "answer, say so, and give the number of the front desk.\n\nVisitor: "
)
_QUESTIONS = (
    "How long may I keep a novel?",
    "How long may I keep a film?",
    "What does a book cost that is ten days late?",
    "May I bring my dog?",
    "Are you open on Sunday afternoon?",
    "Can you recommend a book about lighthouses?",
    "My daughter is six and her book is late. What do we pay?",
)
_EXAMPLES = (
    "Say whether each review is good or bad.\n"
    "Review: The soup was cold and the waiter was rude. Answer: bad\n"
    "Review: We laughed all evening and will come again. Answer: good\n"
    "Review: The room smelled of smoke and the lift was broken. Answer: bad\n"
    "Review: A quiet garden, kind people and the best bread in town. Answer: good\n"
    "Review: They lost my booking and blamed me for it. Answer: bad\n"
)
_REVIEWS = (
    "The music was far too loud.",
    "The music was lovely.",
    "I would not send my worst enemy there.",
    "Everything was as it should be.",
)
_TALK = (
    "User: I want to plant a small vegetable garden behind the house. Where should I begin?\n"
    "Assistant: Begin with the sun. Watch for a day where it shines for six hours or more, and put "
    "your beds there. Then look at the soil: if water stands on it after rain, raise the beds.\n"
    "User: It gets sun from ten to five. The soil is heavy clay.\n",
    "Assistant: Then build raised beds, a foot high, and fill them with compost and topsoil. Clay "
    "below is no harm: it keeps water in dry weeks.\n"
    "User: What grows well in the first year?\n",
    "Assistant: Beans, lettuce, radishes and courgettes forgive nearly every mistake.\n"
    "User: And tomatoes?\n",
    "Assistant: Tomatoes want warmth. Plant them against the wall in the middle of May.\n"
    "User: How often do I water them?\n",
)

FAMILIES: tuple[tuple[str, ...], ...] = (
    tuple(f"{_RULES}{question}\nAssistant:" for question in _QUESTIONS),
    tuple(f"{_EXAMPLES}Review: {review} Answer:" for review in _REVIEWS),
    tuple("".join(_TALK[: turn + 1]) + "Assistant:" for turn in range(len(_TALK))),
    (_STORY + "When the engine stopped,",) * 3,
    (_STORY * 2, _STORY * 2 + _REPORT),
)
"""Questions below one system prompt, cases below one list of examples, turns of one conversation,
the same thing asked three times, and one text that is the beginning of another."""

assert sum(map(len, FAMILIES)) == 20
