"""One tenant that sends ten times its share, and what the others notice, in virtual time.

    python benchmarks/fair_tenants.py [--profile NAME] [--json FILE]
"""
from __future__ import annotations
import dataclasses, sys, argparse
from bros.core.config import EngineConfig
from bros.core.request import ServiceClass
from bros.scheduler.profiles import Profile
from bros.simulator.simulation import *
from bros.simulator.simulation import device_of, read_profile
from bros.workload.arrivals import BeLoad, PoissonLoad, TenantLoad
from bros.workload.attainment import Summary
from pathlib import Path

def scenario(profile, loads, duration=300.0, warm=30.0, seed=1, **cfg):
    return SimulatedScenario(
        config=EngineConfig(max_queue=4000, max_num_seqs=256, max_batch_tokens=2048, **cfg), device=device_of(profile, None),
        rt=PoissonLoad(0, "sharegpt"), be=BeLoad(0),
        tenants=tuple(loads), seed=seed, duration_s=duration, warm_up_s=warm)

def go(name, sc):
    r = build_simulation(sc).run()
    out=[]
    for t in [l.tenant for l in sc.tenants]:
        for c in ServiceClass:
            recs=[x for x in r.records if x.tenant==t and x.service_class is c and x.arrival_s>=sc.warm_up_s]
            if not recs: continue
            tt=[(x.token_times_s[0] if x.token_times_s else r.end_s)-x.arrival_s for x in recs]
            s=Summary.of(tt)
            met=sum(v<=sc.config.slo_ttft/1e3 for v in tt)/len(tt)
            toks=sum(sum(v>=sc.warm_up_s for v in x.token_times_s) + (x.size.prompt_tokens if x.token_times_s and x.token_times_s[0]>=sc.warm_up_s else 0) for x in r.records if x.tenant==t and x.service_class is c)
            fin=[x for x in recs if len(x.token_times_s)>1]
            tp=Summary.of([(x.token_times_s[-1]-x.token_times_s[0])/(len(x.token_times_s)-1) for x in fin])
            out.append((t,c.value,len(recs),s.p50,s.p99,met,toks/(r.end_s-sc.warm_up_s),tp.p99 or 0))
    print(f"== {name}: total tok/s {sum(o[6] for o in out):.0f}, steps {r.steps}")
    for o in out:
        print("  %-6s %-12s n=%-5d ttft p50 %.3f p99 %.3f met %.3f  tok/s %.0f tpot p99 %.3f"%o)
    st=r.stats
    for (t,c),v in sorted(getattr(st,'tenant_seconds',{}).items()): print("   device s",t,c.value,round(v,1))

if __name__=="__main__":
    name=sys.argv[1]; base=float(sys.argv[2]); heavy=float(sys.argv[3]); be=int(sys.argv[4]); hbe=int(sys.argv[5]); n=int(sys.argv[6])
    dur=float(sys.argv[7]) if len(sys.argv)>7 else 200
    p=read_profile(name,[Path("profiles")])
    others=[TenantLoad(f"t{i}",PoissonLoad(base,"sharegpt"),BeLoad(be)) for i in range(1,n)]
    go("ordinary", scenario(p,[TenantLoad("heavy",PoissonLoad(base,"sharegpt"),BeLoad(be)),*others],dur))
    go("rt x", scenario(p,[TenantLoad("heavy",PoissonLoad(heavy,"sharegpt"),BeLoad(be)),*others],dur))
    go("be x", scenario(p,[TenantLoad("heavy",PoissonLoad(base,"sharegpt"),BeLoad(hbe)),*others],dur))
