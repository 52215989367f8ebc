package fleet

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"

	"evenkeel/engine"
)

// ResetPrefixCaches asks every engine to forget its prefix cache and returns what each
// that failed answered.
func (f *Fleet) ResetPrefixCaches(ctx context.Context) error {
	engines := f.Now().Engines()
	failed := make([]error, len(engines))
	var all sync.WaitGroup
	for i, e := range engines {
		all.Go(func() { failed[i] = f.host.reset(ctx, e.At(-1)) })
	}
	all.Wait()
	return errors.Join(failed...)
}

func (h *Host) reset(ctx context.Context, t *engine.Target) error {
	call := h.Client.NewCall(t).Repeat()
	defer context.AfterFunc(ctx, call.Abort)()
	limit := h.Settings().Limits.ConnectTimeout
	resp, err := call.Do(http.MethodPost, "/reset_prefix_cache", nil, nil, engine.Deadlines{Connect: limit, FirstByte: 10 * limit, Idle: limit})
	if err != nil {
		return err
	}
	defer resp.Close()
	if resp.StatusCode() != http.StatusOK {
		return fmt.Errorf("engine %s answered %d to /reset_prefix_cache; it needs VLLM_SERVER_DEV_MODE=1", t.ID, resp.StatusCode())
	}
	return nil
}
