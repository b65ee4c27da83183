-- Lmod modulefile of a checkout:
--     module use CHECKOUT/slurm/modulefiles && module load frontier_llm
-- It activates the environment in CHECKOUT/.venv, or in FRONTIER_LLM_ENV (a virtual or a conda environment).
help("Activates the Python environment of a checkout of frontier_llm, for the shell and for the jobs that it submits.")
whatis("Name: frontier_llm")
whatis("Description: pretraining of language models on AMD MI250X, NVIDIA GPUs and CPUs")

local checkout = string.match(myFileName(), "^(.*)/slurm/modulefiles/")
local environment = os.getenv("FRONTIER_LLM_ENV") or pathJoin(checkout, ".venv")
local python = pathJoin(environment, "bin/python")

if mode() == "load" and not isFile(pathJoin(environment, "bin/frontier-llm")) then
   LmodError(environment .. " has no frontier-llm: run scripts/install_site.sh, or set FRONTIER_LLM_ENV\n")
end
prepend_path("PATH", pathJoin(environment, "bin"))
setenv("FRONTIER_LLM_PYTHON", python) -- the interpreter of the jobs
