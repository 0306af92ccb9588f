import torch, sys, time, cProfile, pstats

sys.path.insert(0, "benchmarks")
import norms, unsum
from unsum.plan.plan import forget
from torch.profiler import profile, ProfilerActivity

for name in list(norms.CUDA)[:1] + list(norms.CUDA)[2:]:
    torch.manual_seed(0)
    model, loss, x, y = norms.CUDA[name]("cuda")
    model = model.to("cuda", torch.bfloat16)
    x = x.cuda()
    y = y.cuda()
    step = norms.with_unsum(loss)

    def t(f, k=10):
        ts = []
        for _ in range(k):
            model.zero_grad()
            torch.cuda.synchronize()
            s = time.perf_counter()
            f()
            torch.cuda.synchronize()
            ts.append(time.perf_counter() - s)
        return sorted(ts)[k // 2]

    for _ in range(3):
        loss(model, x, y).backward()
    p = t(lambda: loss(model, x, y).backward())
    step(model, x, y)
    print(
        name,
        "plain",
        p,
        "norms",
        t(lambda: step(model, x, y)) / p,
        "learn",
        t(lambda: (forget(model), step(model, x, y)), 2) / p,
    )
    pr = cProfile.Profile()
    model.zero_grad()
    pr.enable()
    forget(model)
    step(model, x, y)
    torch.cuda.synchronize()
    pr.disable()
    pstats.Stats(pr).sort_stats("tottime").print_stats(14)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as pr:
        model.zero_grad()
        step(model, x, y)
        torch.cuda.synchronize()
    for e in sorted(pr.key_averages(), key=lambda e: -e.self_device_time_total)[:16]:
        print(f"   {e.self_device_time_total / 1e3:7.2f} ms x{e.count:4d} {e.key[:80]}")
