package detect

import "time"

// ProxyBusy is the kind of the finding that the proxy gets too little processor time.
const ProxyBusy Kind = "proxy_busy"

var busyDetectors = []Detector{{
	Kind: ProxyBusy, find: findProxyBusy, slowsTokens: true, toleratedAbsence: time.Minute,
	harm: slower, sharesNoCause: true, headline: "The proxy gets too little processor time", runbook: "proxy_busy",
	command: "uptime; cat /sys/fs/cgroup/cpu.stat /sys/fs/cgroup/system.slice/evenkeel.service/cpu.stat; top -b -n 1 | head -20",
	clients: "Each token and each decision of this proxy waits for a processor, for all clients.",
	next: "Look what else runs on the proxy's machine, and at the processor limit of its container or service (nr_throttled). Do not " +
		"restart engines that this page calls late.",
}}

const (
	ownWindow = 20 * time.Second
	// from this share of lateness on, the proxy cannot judge engines by its own clock
	busyShare    = 0.2
	allUsedShare = 0.8 // from this share of its processors on, the proxy itself keeps them busy
)

// own is zero if the proxy runs for less than half of ownWindow.
func (r *Ring) own() (own Own) {
	list := r.fine.list
	last := r.Last()
	if last == nil {
		return own
	}
	first := last
	for i := len(list) - 1; i > 0 && (first == last || last.At.Sub(list[i-1].At) <= ownWindow); i-- {
		own.LateShare += list[i].LateMs
		own.LatestMs = max(own.LatestMs, list[i].LatestMs)
		first = &list[i-1]
	}
	seconds := last.At.Sub(first.At).Seconds()
	if seconds < ownWindow.Seconds()/2 {
		return Own{}
	}
	own.LateShare /= 1000 * seconds
	own.UsedCores, own.Cores = (last.CPUSeconds-first.CPUSeconds)/seconds, last.Cores
	return own
}

// isBusy: then a late engine may be the proxy's own lateness.
func (o *Own) isBusy() bool { return o.LateShare > busyShare }

func findProxyBusy(v *view, report reportFunc) {
	o := &v.Proxy.Own
	if !o.isBusy() {
		return
	}
	who := "so something else has them, or a limit is set"
	if o.UsedCores >= allUsedShare*float64(o.Cores) {
		who = "so it has too few"
	}
	report(proxyPlace("proxy"), noReason, "The proxy gets too little processor time: in the last %.0f s its timers "+
		"were late for %.0f %% of the time, one by %s, and it used %.1f of its %d cores, %s", ownWindow.Seconds(),
		100*o.LateShare, spokenMs(o.LatestMs), o.UsedCores, o.Cores, who).setSlowdown(max(1, v.running), 1/max(0.01, 1-o.LateShare))
}

// From manyHosts hosts on, late engines follow from the proxy: one host may hang by itself.
const manyHosts = 2

type ownClock int

const (
	_            ownClock = iota
	engineIsLate          // or the proxy looked too late
	proxyIsLate
)

// followsFromProxy: by its late clock a busy proxy finds that rounds and steps are slow, and that
// engines answer late, at many hosts at once.
func (v *view) followsFromProxy(all []Finding) {
	if !v.Proxy.Own.isBusy() {
		return
	}
	hosts := map[string]bool{}
	for i := range all {
		if kinds[all[i].Kind].byOwnClock == engineIsLate {
			hosts[hostOf(all[i].Where)] = true
		}
	}
	for i := range all {
		clock := kinds[all[i].Kind].byOwnClock
		all[i].follows = clock == proxyIsLate || clock == engineIsLate && len(hosts) >= manyHosts
	}
}
