// Kueue's manager with the controllers of its own kinds, of topologies among them, its scheduler and its webhooks, and the
// integration with JobSet where its configuration names that.
//
// The stock program links an integration with every other kind of job (Ray, Kubeflow ...), MultiKueue and a visibility
// server, which are most of its build time and none of which an RLJob meets. JobSet's is one package more of 935. Order
// as in sigs.k8s.io/kueue's cmd/kueue.
package main

import (
	"flag"
	"os"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
	jobsetapi "sigs.k8s.io/jobset/api/jobset/v1alpha2"

	configapi "sigs.k8s.io/kueue/apis/config/v1beta2"
	kueue "sigs.k8s.io/kueue/apis/kueue/v1beta2"
	qcache "sigs.k8s.io/kueue/pkg/cache/queue"
	schdcache "sigs.k8s.io/kueue/pkg/cache/scheduler"
	"sigs.k8s.io/kueue/pkg/config"
	"sigs.k8s.io/kueue/pkg/constants"
	"sigs.k8s.io/kueue/pkg/controller/core"
	"sigs.k8s.io/kueue/pkg/controller/core/indexer"
	"sigs.k8s.io/kueue/pkg/controller/jobframework"
	"sigs.k8s.io/kueue/pkg/controller/jobs/jobset"
	"sigs.k8s.io/kueue/pkg/controller/tas"
	tasindexer "sigs.k8s.io/kueue/pkg/controller/tas/indexer"
	"sigs.k8s.io/kueue/pkg/metrics"
	"sigs.k8s.io/kueue/pkg/scheduler"
	preemptexpectations "sigs.k8s.io/kueue/pkg/scheduler/preemption/expectations"
	"sigs.k8s.io/kueue/pkg/util/waitforpodsready"
	"sigs.k8s.io/kueue/pkg/webhooks"
)

func main() {
	file := flag.String("config", "", "a Configuration of config.kueue.x-k8s.io/v1beta2")
	certificates := flag.String("cert-dir", "", "tls.crt and tls.key of the webhooks")
	zapOptions := zap.Options{}
	zapOptions.BindFlags(flag.CommandLine)
	flag.Parse()
	ctrl.SetLogger(zap.New(zap.UseFlagOptions(&zapOptions)))

	scheme := runtime.NewScheme()
	utilruntime.Must(clientgoscheme.AddToScheme(scheme))
	utilruntime.Must(kueue.AddToScheme(scheme))
	utilruntime.Must(configapi.AddToScheme(scheme))
	utilruntime.Must(jobsetapi.AddToScheme(scheme))

	options, cfg, err := config.Load(scheme, *file)
	must(err, "load the configuration")
	must(utilfeature.DefaultMutableFeatureGate.SetFromMap(cfg.FeatureGates), "set feature gates")
	options.Metrics = metricsserver.Options{BindAddress: "0"}
	options.WebhookServer = webhook.NewServer(webhook.Options{Port: *cfg.Webhook.Port, CertDir: *certificates})
	metrics.Register()

	client := ctrl.GetConfigOrDie()
	client.QPS, client.Burst = *cfg.ClientConnection.QPS, int(*cfg.ClientConnection.Burst)
	ctx := ctrl.SetupSignalHandler()
	mgr, err := ctrl.NewManager(client, options)
	must(err, "make the manager")

	wait := cfg.WaitForPodsReady
	blocks := waitforpodsready.Enabled(wait) && wait.BlockAdmission != nil && *wait.BlockAdmission
	cache := schdcache.New(mgr.GetClient(), schdcache.WithPodsReadyTracking(blocks))
	requeuer := qcache.NewRequeuer()
	must(mgr.Add(requeuer), "add the requeuer")
	expected := preemptexpectations.New()
	queues := qcache.NewManager(mgr.GetClient(), cache, requeuer, qcache.WithPreemptionExpectations(expected))
	must(indexer.Setup(ctx, mgr.GetFieldIndexer()), "set up indexes")
	must(tasindexer.SetupIndexes(ctx, mgr.GetFieldIndexer()), "set up indexes of topologies")
	must(mgr.AddReadyzCheck("readyz", mgr.GetWebhookServer().StartedChecker()), "add the ready check")
	must(mgr.AddHealthzCheck("healthz", healthz.Ping), "add the health check")
	failed, err := core.SetupControllers(mgr, queues, cache, &cfg, nil, expected, nil)
	must(err, "set up controller "+failed)
	failed, err = tas.SetupControllers(mgr, queues, cache, &cfg, nil)
	must(err, "set up controller "+failed)
	if slices.Contains(cfg.Integrations.Frameworks, jobset.FrameworkName) {
		selector, err := metav1.LabelSelectorAsSelector(cfg.ManagedJobsNamespaceSelector)
		must(err, "read managedJobsNamespaceSelector")
		jobs := []jobframework.Option{
			jobframework.WithEnabledFrameworks([]string{jobset.FrameworkName}),
			jobframework.WithManageJobsWithoutQueueName(cfg.ManageJobsWithoutQueueName),
			jobframework.WithManagedJobsNamespaceSelector(selector),
			jobframework.WithWaitForPodsReady(cfg.WaitForPodsReady),
			jobframework.WithManagerName(constants.KueueName),
			jobframework.WithCache(cache),
			jobframework.WithQueues(queues),
		}
		must(jobframework.SetupIndexes(ctx, mgr.GetFieldIndexer(), jobs...), "set up indexes of JobSets")
		must(jobframework.SetupControllers(ctx, mgr, ctrl.Log, jobs...), "set up the integration with JobSet")
	}
	failed, err = webhooks.Setup(mgr, nil)
	must(err, "set up webhook "+failed)
	go queues.CleanUpOnContext(ctx)
	go cache.CleanUpOnContext(ctx)
	must(mgr.Add(scheduler.New(
		queues, cache, mgr.GetClient(), mgr.GetEventRecorderFor(constants.AdmissionName),
		scheduler.WithPreemptionExpectations(expected),
	)), "add the scheduler")
	must(mgr.Start(ctx), "run the manager")
}

func must(err error, what string) {
	if err != nil {
		ctrl.Log.Error(err, "cannot "+what)
		os.Exit(1)
	}
}
