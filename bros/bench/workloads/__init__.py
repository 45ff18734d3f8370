"""The workloads of `bros bench`.

    contents.py    contents: what is requested      lengths of BROS Table 2, shared prefixes of
                                                    Preble Table 1, chats of several turns
                   arrivals: when                   random, or recorded in a trace
                   loops: OpenLoop = content x arrivals, ClosedLoop = content x in flight
    catalogue.py   contents by name                 also from ShareGPT files and traces

Everything depends on seeds alone. The conversations of a content do not depend on the arrivals:
another rate only stretches the gaps between them.
"""
