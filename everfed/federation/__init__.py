"""Real clients: everfed's one round loop over Flower, with each client's state on its own disk.

    server:  runner -> engine.Federated -> transport -> unix socket -> flower.server_app -> SuperLink
    client:  SuperNode -> flower.client_app (no torch) -> unix socket -> worker -> client.RealClient -> run_client

Nothing is imported here: a client's app must start fast, without torch.
"""
