"""For all tests."""

import signal

# A shell that starts a job in the background has it ignore Ctrl-C, and so all that it starts; tests
# that send one need it heard.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
