# The one graph: text notebook + modules + parameters -> results -> book.
# `make book` runs it; so does `snakemake --cores 2 --config preset=quick` in the environment.
import json
import sys
from pathlib import Path

from attnlib.runner import modules_used, notebook_names, preset_parameters, results_read

PRESET = config.get("preset", "quick")
RESULTS = f"results/{PRESET}"
NOTEBOOKS = notebook_names()
STAGE, SITE = f"build/stage/{PRESET}", f"build/book/{PRESET}"
TIME_LIMIT = 600 if PRESET == "smoke" else 24 * 3600  # seconds that a cell may take
JUPYTER_BOOK = Path(sys.executable).with_name("jupyter-book")
# The first trains models side by side on all cores. The others that train, and what waits for
# them, take longest of the rest, and start first, so that the short ones fill up what they leave
# idle.
ALL_CORES = {"01_data_and_models"}
PRIORITY = {
    "12_sd_attention": 5,
    "17_hybrids_and_head_sizes": 4,
    "16_linearising": 4,
    "18_prescription": 3,
    "14_what_rank_two_means": 2,
    "15_trimming": 2,
    "09_heads": 1,
    "10_energy_gates": 1,
    "07_complexity": 1,
    "05_scale_selective_pod": 1,
}


def text_file(name):
    """A corpus that is somebody's own file is an input too."""
    corpus = preset_parameters(PRESET, name).get("corpus", "")
    return [corpus] if Path(corpus).is_file() else []


rule notebooks:
    input:
        [f"{RESULTS}/{name}.nc" for name in NOTEBOOKS],


rule book:
    default_target: True
    input:
        f"{SITE}/_build/html/index.html",
        # Named here as well, so that a result that somebody deleted is made again.
        rules.notebooks.input,


for name in NOTEBOOKS:

    rule:
        name:
            f"notebook_{name}"
        input:
            notebook=f"notebooks/{name}.md",
            modules=modules_used(name),
            text=text_file(name),
            results=[f"{RESULTS}/{other}.nc" for other in results_read(name)],
        params:
            name=name,
            values=json.dumps(preset_parameters(PRESET, name), sort_keys=True),
        output:
            data=f"{RESULTS}/{name}.nc",
            executed=f"{RESULTS}/notebooks/{name}.ipynb",
        threads: workflow.cores if name in ALL_CORES else 1
        priority: PRIORITY.get(name, 0)
        resources:
            # With `--resources gpu=1` one notebook at a time has the GPU.
            gpu=1,
        shell:
            # exec: the notebook is a child of this process, and ends with it.
            "exec env OMP_NUM_THREADS={threads} {sys.executable} -m attnlib run {params.name} "
            "--preset {PRESET} --out {RESULTS} --time-limit {TIME_LIMIT} > /dev/null"


rule pages:
    input:
        [f"{RESULTS}/notebooks/{name}.ipynb" for name in NOTEBOOKS],
        ["_config.yml", "_toc.yml"],
        [f"book/{page}" for page in glob_wildcards("book/{page}").page],
        [f"attnlib/{m}.py" for m in glob_wildcards("attnlib/{m}.py").m],
    output:
        f"{SITE}/_build/html/index.html",
    log:
        f"build/book/{PRESET}.log",
    shell:
        # A fresh copy holds just what the table of contents names, each notebook once (executed).
        "rm -rf {STAGE} {SITE} && mkdir -p {STAGE}/notebooks {SITE} && "
        "cp -r book _config.yml _toc.yml {STAGE} && "
        "cp {RESULTS}/notebooks/[0-9]*[a-z].ipynb {STAGE}/notebooks && "
        "rm -f {STAGE}/notebooks/*.failed.ipynb {STAGE}/notebooks/*.running.ipynb && "
        "{{ {JUPYTER_BOOK} build {STAGE} --path-output {SITE} -n -W --keep-going "
        "--quiet > {log} 2>&1 || {{ cat {log} >&2; exit 1; }} }}"
