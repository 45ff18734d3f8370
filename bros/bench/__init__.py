"""`bros bench`: sends a hybrid load to a server and measures attainment and throughput."""
