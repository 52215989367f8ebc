package engine

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
)

// Models reads GET /v1/models, bounded by ctx. With a PageError the models are known, but not the context of all of them.
func Models(ctx context.Context, c *Client, t *Target) ([]Model, error) {
	body, err := c.read(ctx, t, "/v1/models", answerLimit)
	if err != nil {
		return nil, err
	}
	models, err := parseModels(body)
	if err != nil {
		return models, fmt.Errorf("engine %s: GET /v1/models: %w", t.ID, err)
	}
	return models, nil
}

func parseModels(body []byte) ([]Model, error) {
	var list struct {
		Data []struct {
			ID          string `json:"id"`
			Parent      string `json:"parent"`
			MaxModelLen Number `json:"max_model_len"`
		} `json:"data"`
	}
	if err := json.Unmarshal(body, &list); err != nil || list.Data == nil {
		return nil, ErrNotAnEngine
	}
	models := make([]Model, 0, len(list.Data))
	var odd error
	for _, d := range list.Data {
		if d.ID == "" {
			continue
		}
		longest, err := d.MaxModelLen.Whole("max_model_len", MostContext)
		odd = cmp.Or(odd, err)
		models = append(models, Model{ID: d.ID, Parent: d.Parent, MaxModelLen: longest})
	}
	return models, odd
}
