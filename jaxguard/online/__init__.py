"""Guards in front of a running agent: a function-calling loop with mock tools, judged afterwards."""
