"""What every test shares: suites that need real parts are skipped with a reason where these are absent."""
