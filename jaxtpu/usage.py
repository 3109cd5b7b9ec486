"""What `run.py help` says."""

USAGE = """\
jaxtpu: trains large models on TPU slices with little memory per core.

  python run.py --config=FILE [--config.FIELD=VALUE ...] [--workdir=DIR]
      Train, or resume the run in DIR (default: runs/<name of the config>).
      FILE is a Python file with get_config(), FILE:ARG passes it an argument,
      or the config.json that a run left behind.
      Where there are several processes, all run the same command: those of a Cloud TPU slice,
      GKE and SLURM find each other; by hand, each adds
      --coordinator=HOST:PORT --processes=N --process_id=I.
  python run.py checkpoints --workdir=DIR [--verify] [--prune]
      List what a run has saved; read and verify all of it; delete what is damaged or not kept.
  python run.py plan --config=FILE --slice=SLICE[,SLICE ...] [--hbm_gib=N] [--tokens=N]
                     [--open=FIELD,...] [--compiles=N]
      What fits on a slice, how fast it runs and what it costs, decided by the TPU compiler
      with no TPU: --slice=v3-8, v3-32, v5e-16, 2xv3-32, ... Mesh, remat, attention and
      microbatches are tried, but for what FILE or the command line sets; --open=mesh tries
      others all the same. --hbm_gib is the budget of a device, --tokens the length of the
      training to price. Writes plans/<name>/.
  python run.py plan --validate
      Predicted speeds beside published measurements, and the time model's constants.
  python run.py plan --update-goldens
      Compile the recorded train steps again and record what changed.
  python run.py generate --workdir=DIR [--prompt=TEXT] [--tokens=N] [--temperature=T] [--seed=N]
      Write text with the latest checkpoint of a run.
  python run.py evaluate --workdir=DIR [--split=SPLIT] [--task=FILE.jsonl]
      Loss, perplexity, bits per byte, accuracy and top-5 of the latest checkpoint on a split, of
      each source of a mixture; or the accuracy on questions of multiple choice, by likelihood.
      Adds a line to DIR/evaluations.jsonl.
  python run.py debug-step --workdir=DIR [--config.FIELD=VALUE ...]
      Run the step again at which a run stopped for a number that is not finite, and show where
      that is first; with --config.precision.compute=float32, say, whether it still is.
  python run.py import --from=DIR [--config=FILE] [--config.FIELD=VALUE ...] [--workdir=DIR]
      Make a run of a Hugging Face model: config.json, *.safetensors and tokenizer files in DIR.
      model.* is taken from there; what FILE or the command line sets of it must agree.
  python run.py export --workdir=DIR --to=DIR [--dtype=float32|bfloat16]
      Write the latest checkpoint of a run as a Hugging Face model.
  python run.py tokenizer --config=FILE --vocab_size=N --to=DIR
      Train a byte-level BPE tokenizer on the training split, for data.tokenizer=hf:DIR.
  python run.py help [config]
      This text; with `config`, every field of a configuration.

Without an accelerator, CPU devices are emulated (mesh.emulate, 8 by default).
Exit codes: 0 done, 1 failed, 2 wrong configuration or command line,
3 no plan fits, 4 the watchdog ended a process that waited too long (start it again),
5 the last checkpoint could not be saved, 130 or 143 stopped by Ctrl-C or SIGTERM after saving.
"""
