"""Expert routing: chooses experts for each token, and sorts the (token, expert) pairs."""
