"""Several replicas of the server behind one address, by Ray Serve. Needs ``pip install 'foretoken[ray]'``.

What decides (`blocks`, `affinity`, `scaling`, `merging`, `gateway`) knows nothing of Ray; `application`, `router` and
`cluster` tie it to Ray Serve.
"""
