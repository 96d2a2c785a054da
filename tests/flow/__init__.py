"""The whole path in memory: client, router, pools, token stream."""
