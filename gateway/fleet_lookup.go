package gateway

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"

	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// lookup finds a model's route. known is false while no engine has told which
// models it serves, when an unknown name proves nothing.
func (f *fleet) lookup(model string) (r route, ok, known bool) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	r, ok = f.routes[model]
	return r, ok, len(f.routes) > 0
}

// models are the names that some healthy engine serves.
func (f *fleet) models() []route {
	f.mu.RLock()
	defer f.mu.RUnlock()
	var list []route
	for _, r := range f.routes {
		if r.prefill || r.decode {
			list = append(list, r)
		}
	}
	slices.SortFunc(list, func(a, b route) int { return strings.Compare(a.name, b.name) })
	return list
}

// rankMemory is how long a rank is known after its engine: far longer than an
// assignment takes to become a call. Calls hold the rank themselves.
const rankMemory = 10 * time.Minute

// forgetRanks drops the ranks of engines that are gone for long, for in a cluster
// that rolls they come under new names for ever. Their numbers stay theirs. It is
// called with f.mu held.
func (f *fleet) forgetRanks(now time.Time) {
	for id, r := range f.ranks {
		switch {
		case f.instances[r.Instance] != nil:
			r.gone = time.Time{}
		case r.gone.IsZero():
			r.gone = now
		case now.Sub(r.gone) > rankMemory:
			delete(f.ranks, id)
		}
	}
}

// rank finds where a worker is. Assignments name only workers the fleet has
// published.
func (f *fleet) rank(worker int32) *rank {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.ranks[worker]
}

// rankOf finds the decode rank of a name that serves a board.
func (f *fleet) rankOf(name, board string) (worker int32, ok bool) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	id, ok := f.ids[name]
	r := f.ranks[id]
	if !ok || r == nil {
		return 0, false
	}
	in := f.instances[r.Instance]
	return id, in != nil && len(in.status.Models) > 0 && boardOf(in.status.Models) == board
}

// beside adds to list the workers behind the same API server as one of them,
// itself included, that are not there yet.
func (f *fleet) beside(worker int32, list []int32) []int32 {
	f.mu.RLock()
	defer f.mu.RUnlock()
	one := f.ranks[worker]
	if one == nil { // gone, and nobody is sent there
		return list
	}
	for id, r := range f.ranks {
		if r.Instance == one.Instance && !slices.Contains(list, id) {
			list = append(list, id)
		}
	}
	return list
}

// downSince tells whether an engine is down, or was down after a moment.
func (f *fleet) downSince(key string, at time.Time) bool {
	s := f.gw.monitor.Status(key)
	return !s.Up || s.Since.After(at)
}

// rejectionFrees tells whether a decode engine that answers a request with an
// error status is known to tell the prefiller to free the hand-off: the profile
// says so, or its version does it.
func (f *fleet) rejectionFrees(r *rank) bool {
	if says := r.Profile.RejectReleases; says != nil {
		return *says
	}
	f.mu.RLock()
	defer f.mu.RUnlock()
	in, ok := f.instances[r.Instance]
	if !ok {
		return false
	}
	major, minor, ok := parseVersion(in.status.Version)
	return ok && (major > 0 || minor >= rejectReleasesMinor)
}

// rejectReleasesMinor is the first 0.x of vLLM that notifies the prefiller of a
// rejected decode request (vLLM PR 41269, May 2026).
const rejectReleasesMinor = 25

// namesRequests tells whether hand-offs of an engine's version name the request
// that made them. A hand-off of such a version that lacks the name is faulty, and a
// decode engine would wait for its KV for ever.
func (f *fleet) namesRequests(c prefill.Candidate) bool {
	f.mu.RLock()
	defer f.mu.RUnlock()
	in, ok := f.instances[c.Instance]
	if !ok {
		return false
	}
	major, minor, ok := parseVersion(in.status.Version)
	return ok && c.Profile.Connector == mooncake.AscendMooncakeV1 && (major > 0 || minor >= requestIDsMinor)
}

// requestIDsMinor is the first 0.x of vllm-ascend, which reports the version of
// vLLM that it is made for, whose hand-offs have a remote_request_id.
const requestIDsMinor = 14

func parseVersion(v string) (major, minor int, ok bool) {
	parts := strings.SplitN(strings.TrimPrefix(v, "v"), ".", 3)
	if len(parts) < 2 {
		return 0, 0, false
	}
	major, err1 := strconv.Atoi(parts[0])
	minor, err2 := strconv.Atoi(parts[1])
	return major, minor, err1 == nil && err2 == nil
}

// differ says that a decode engine answered 404 for a model whose prompt the prefill
// engine had computed: they were started for different models or adapters, or are
// of versions that name them differently. It is said once for a pair, and again when
// one of them comes back as another version.
func (f *fleet) differ(prefill, decode, model string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	p, d := f.instances[prefill], f.instances[decode]
	if p == nil || d == nil {
		return
	}
	pair, versions := [2]string{prefill, decode}, [2]string{p.status.Version, d.status.Version}
	if was, said := f.differing[pair]; said && was == versions {
		return
	}
	f.differing[pair] = versions
	f.gw.log.Error("ALARM: prefill and decode engine do not fit together: the decode engine answered 404 for a model that the prefill engine knows; start both with the same model, adapters and version",
		zap.String("model", model), zap.String("prefill", p.id), zap.String("prefill_version", versions[0]), zap.String("decode", d.id), zap.String("decode_version", versions[1]))
}

// up counts the engines that take requests now, count those there are.
func (f *fleet) up() (prefills, decodes int) {
	return f.tally(func(in *instance) bool { return in.serving && f.takes(in, -1) && len(in.status.Models) > 0 })
}

func (f *fleet) count() (prefills, decodes int) {
	return f.tally(func(*instance) bool { return true })
}

func (f *fleet) tally(of func(*instance) bool) (prefills, decodes int) {
	f.mu.RLock()
	defer f.mu.RUnlock()
	for _, in := range f.instances {
		switch {
		case !of(in):
		case in.role == rolePrefill:
			prefills++
		default:
			decodes++
		}
	}
	return prefills, decodes
}
