"""Reinforcement learning as pure functions on tensors: no simulator, no policy, no process.

rewards      episode -> reward of every control step
advantages   rewards, values -> advantages and returns (GAE); scores -> group advantages (GRPO, RLOO)
filters      which groups are trained on, and how many more to sample
masks        which actions of a chunk are the policy's own
reductions   log-probability per action -> per ratio (action or chunk; sum or mean)
weights      how much each ratio counts: the named aggregations
losses       PPO, value, entropy, KL, regression, as sums
corrections  data of older weights
batches      rows -> minibatches -> micro-batches of every rank
health       on-policy check, explained variance, gradient noise
config       every choice, with the contradictions refused
"""
