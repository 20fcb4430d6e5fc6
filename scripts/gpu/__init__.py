"""What scripts/gpu_suite.py is made of.

model       the Llama that is trained, and its batches
cases       every way to train it
measure     one case in a process of its own: times, losses, memory, copies
rates       what the machine gives: link, device memory, update kernels, page-locking
machine     what it is, and that nothing would be measured in place of what is meant
child       what a process of the suite does; processes gives it a time limit
copies      copies and update kernels of a step, from a trace
testing     tests on the accelerator, in processes of their own, resumable; plugin is their side of it
recipes     the recipes on the tiny default and on random weights of a large model
record      the result file, and what follows from several results
parts       what belongs to one command of the plan, in order
suite       runs what is not in the record yet, within the time that there is
report      README's table
planned     the planner's word on the recipes beside what they took, for docs/planning.md
"""
