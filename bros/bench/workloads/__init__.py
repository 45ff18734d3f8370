"""What is asked (contents) and when (arrivals), for every workload that `bros bench` knows.

    contents                                    loops
    drawn.py          BROS Table 2          --> loops.py     OpenLoop = content x arrivals
    shared_prefix.py  Preble Table 1                         ClosedLoop = content x in flight
    conversations.py  growing prompts
    traces.py         Azure, Mooncake, BurstGPT    fitting.py    to the model's context
    sharegpt.py       real text                    catalogue.py  by name

Everything depends on seeds alone. A content gives the same conversations whatever the arrivals
are: at another rate the same ones come with their gaps stretched.
"""
