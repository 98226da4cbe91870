"""Steps of the CPU engine in this process, beside what the machine allows."""
