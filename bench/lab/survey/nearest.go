package survey

import (
	"math"
	"strings"

	"evenkeel/bench/lab/laws"
	"evenkeel/dispatcher/step"
)

// Near is the law of the table that is nearest to the steps that were seen.
type Near struct {
	Name  string  `json:"name"`
	Form  string  `json:"form"`
	Error float64 `json:"error"` // mean of the errors, as a share of the steps
	Among int     `json:"among"` // laws
	Same  bool    `json:"same_model"`
}

// Far is the mean error above which the nearest law is no law of these engines.
const Far = 0.2

// Nearest is, of the laws of as many ranks of this engine, the one with the least mean error over
// the steps that were seen. It is one of this model if the table has any. Nil: there is none, or
// nothing was seen.
func Nearest(engine, model string, ranks int, windows []Window) (n *Near) {
	if len(windows) == 0 {
		return nil
	}
	model = model[strings.LastIndexByte(model, '/')+1:]
	var all, same []laws.Entry
	for _, e := range laws.All() {
		if e.Ranks != ranks || e.Engine != engine {
			continue
		}
		all = append(all, e)
		if of, _, _ := strings.Cut(e.Name(), ","); strings.EqualFold(of, model) {
			same = append(same, e)
		}
	}
	among := all
	if len(same) > 0 {
		among = same
	}
	for i := range among {
		for _, law := range []step.Law{among[i].Law(), among[i].Served()} { // they differ in what prompts take
			if err := Off(&law, windows); n == nil || err < n.Error {
				n = &Near{Name: among[i].Name(), Form: law.Form.String(), Error: err, Among: len(among), Same: len(same) > 0}
			}
		}
	}
	return n
}

// Off is the mean error of a law over the steps of some windows.
func Off(law *step.Law, windows []Window) float64 {
	sum, steps := 0.0, 0.0
	for i := range windows {
		w := &windows[i]
		decoding := make([]step.Rank, len(w.Ranks))
		for k, r := range w.Ranks {
			decoding[k] = step.Rank{Requests: r.Requests, KV: r.KV}
		}
		ms := (1-w.Prompting)*law.Ms(decoding) + w.Prompting*law.Ms(w.Ranks)
		sum += w.Steps * math.Abs(ms/w.StepMs-1)
		steps += w.Steps
	}
	return sum / steps
}
