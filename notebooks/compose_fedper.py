# %% [markdown]
# # FedPer from its parts, and what it gains
#
# A notebook kept as text: open it with Jupytext, or in an editor that knows `# %%` cells.

# %%
import fedjax_pers as fp

federation = fp.data.load("vowel_speakers")
task = fp.tasks.from_model(federation, "mlp")
print(federation)

# %% [markdown]
# Which leaves stay at home, and what that saves:

# %%
layout = fp.by_role(personal=fp.head(1))
print(fp.describe(layout(task)))

# %% [markdown]
# Layout, client update and aggregator make a method. FedAvg is the same without the layout.

# %%
client = fp.train(0.1, epochs=1, batch_size=10)
fedavg = fp.compose(task, client=client)
fedper = fp.compose(task, layout=layout, client=client, aggregator=fp.mean())

# %%
accuracy = {}
for name, algorithm in {"fedavg": fedavg, "fedper": fedper}.items():
    state, history = fp.run(algorithm, None, federation, 20, key=0)
    accuracy[name] = history.evaluations[-1][1].personal["accuracy"]
    print(name, fp.summarize(accuracy[name], history.evaluations[-1][1].examples)["unweighted_mean"])

# %% [markdown]
# Client by client:

# %%
for client_id, before, after in zip(federation.client_ids, accuracy["fedavg"], accuracy["fedper"], strict=True):
    print(f"{client_id:12s} {before:.2f} -> {after:.2f}")
