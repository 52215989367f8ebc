package laws

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"evenkeel/internal/spelling"
)

// Find returns the law of a name, whose letters may be of either case. The table has no law between two numbers of ranks: experts are
// spread over all of them, so that another number is another engine.
func Find(name string) (*Entry, error) {
	all := file().Laws
	names := make([]string, len(all))
	for i := range all {
		if names[i] = all[i].Name(); strings.EqualFold(names[i], name) {
			return &all[i], nil
		}
	}
	parts := strings.Split(name, ",")
	alike := func(n int) string { // those that begin with as many of its words
		begin := strings.ToLower(strings.Join(parts[:min(n, len(parts))], ",")) + ","
		same := slices.DeleteFunc(slices.Clone(names), func(n string) bool { return !strings.HasPrefix(strings.ToLower(n), begin) })
		if len(same) == 0 {
			return ""
		}
		if more := len(same) - shown; more > 0 {
			return fmt.Sprintf("; like it are %s and %d more", strings.Join(same[:shown], " "), more)
		}
		return "; like it are " + strings.Join(same, " ")
	}
	like := cmp.Or(alike(min(3, len(parts))), spelling.Hint(name, names), alike(2), alike(1))
	return nil, fmt.Errorf("%q is no law of the table%s; write MODEL,ENGINE,GPU,RANKS as in DeepSeek-V3,vllm,H200,8 "+
		"(evenkeel simulate --law list prints all)", name, like)
}

// shown are how many names an error has at most.
const shown = 8

// List writes which laws there are: a line for each model, engine, GPU and form.
func List(w io.Writer) error {
	type kind struct{ model, engine, gpu, form string }
	ranks, kinds := map[kind][]string{}, []kind(nil)
	for _, e := range file().Laws {
		model, _, _ := strings.Cut(e.Name(), ",")
		k := kind{model: model, engine: e.Engine, gpu: e.GPU, form: e.Form().String()}
		if ranks[k] == nil {
			kinds = append(kinds, k)
		}
		ranks[k] = append(ranks[k], fmt.Sprint(e.Ranks))
	}
	slices.SortStableFunc(kinds, func(a, b kind) int {
		return cmp.Or(cmp.Compare(strings.ToLower(a.model), strings.ToLower(b.model)), cmp.Compare(b.engine, a.engine))
	})
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "MODEL\tENGINE\tGPU\tRANKS\tform of a decode step")
	for _, k := range kinds {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", k.model, k.engine, k.gpu, strings.Join(ranks[k], " "), k.form)
	}
	return t.Flush()
}
