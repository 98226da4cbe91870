"""What onbeat's models say of a vLLM server, against that server."""
