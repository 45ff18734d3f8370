"""A chain of LangChain prompts that the server renders. Requires `pip install .[langchain]`.

LangChain would render the first prompt, wait for the response, and render the second prompt with
it. Here the client submits both prompts together, and the server starts the second call itself.
"""

from __future__ import annotations

from common import arguments, open_session, show_graph
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough

from bros.langchain import BrosChat, SemanticPrompt, Value

SAMPLING = {"temperature": 0.2, "seed": 5, "max_tokens": 40}

describe = SemanticPrompt(
    ChatPromptTemplate.from_messages(
        [("system", "You write for children."), ("human", "Describe {animal} in one sentence.")]
    ),
    name="describe",
    sampling=SAMPLING,
    transforms={"output": "strip"},
)
ask_back = SemanticPrompt(
    ChatPromptTemplate.from_messages(
        [
            ("system", "You are a teacher."),
            ("human", "Ask one question about {animal} after this text: {description}"),
        ]
    ),
    name="ask_back",
    sampling=SAMPLING,
)
chain = RunnablePassthrough.assign(description=describe) | ask_back | Value()


def main() -> None:
    given = arguments(__doc__.splitlines()[0])
    with open_session(given) as session:
        for piece in chain.stream({"animal": "a seal"}):
            print(piece, end="", flush=True)
        print()
        if given.url is not None:
            # Ordinary requests can join the same session.
            model = BrosChat(url=given.url, session=session.id, node="answer", max_tokens=40)
            print(model.invoke("What do seals eat?").content)
        show_graph(session)


if __name__ == "__main__":
    main()
