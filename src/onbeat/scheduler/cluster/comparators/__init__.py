"""The rules of published systems, to compare onbeat's own with: chosen by name, and in nothing else's way.

Llumnix (Sun et al., OSDI 2024): router, moves and scaling by `freeness`. DistServe (Zhong et al., OSDI 2024)
and Splitwise (Patel et al., ISCA 2024): how prompts and streams share two pools of replicas.
"""
